// Sorts what the search finds: first what has the words of the query in its title. By itself Sphinx
// sorts pages that have all words somewhere by their titles, from A to Z.

const asked = (new URLSearchParams(location.search).get("q") || "")
  .toLowerCase()
  .split(/[^\w]+/)
  .filter((word) => word.length > 1);

const begin = (word) => word.slice(0, Math.max(3, word.length - 2)); // of request, requests, ...

var Scorer = {
  score: ([, title, , description, score, , kind]) => {
    const words = title.toLowerCase().split(/[^\w]+/);
    const both = asked.filter((word) => words.some((other) => other.startsWith(begin(word))));
    const member = kind === "object" && /attribute|property|method/.test(description);
    return score + (20 * both.length) / (asked.length || 1) - (member ? 15 : 0);
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
