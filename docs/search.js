// Sorts what the search finds: first pages that are written by hand and pages of commands, among
// them what has the words of the query in its title; then classes; members of classes last. By
// itself Sphinx sorts pages that have all words somewhere by their titles, from A to Z.

const LITTLE = new Set("an and did do does for how in is it of on the to with".split(" "));

const query = (new URLSearchParams(location.search).get("q") || "").toLowerCase();
const isName = /\w[._]\w/.test(query); // of Python
const asked = query
  .split(/[^\w]+/)
  .filter((word) => word.length > 1 && !LITTLE.has(word));

const begin = (word) => word.slice(0, Math.max(3, word.length - 2)); // of request, requests, ...

const KINDS = [
  [/glossary/, 16],
  [/^docs\/how-to\//, 14],
  [/^docs\//, 12],
  [/^build\/interface\/kvcore-/, 12],
];

var Scorer = {
  score: ([page, title, anchor, description, score, , kind]) => {
    const words = title.toLowerCase().split(/[^\w]+/);
    const both = asked.filter((word) => words.some((other) => other.startsWith(begin(word))));
    const [, written] = KINDS.find(([pattern]) => pattern.test(page)) || [null, 0];
    const member = kind === "object" && !/class|module/.test(description);
    const part = isName ? 0 : member ? 25 : anchor ? 4 : 0;
    return score + (20 * both.length) / (asked.length || 1) + written - part;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
