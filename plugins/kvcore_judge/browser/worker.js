// Python beside the page: loads kvcore from the files of the site, and runs policies.

// What a policy is not to have, since it may be anybody's: the network, and what the site keeps.
const CLOSED = [
  "fetch", "XMLHttpRequest", "WebSocket", "WebSocketStream", "EventSource", "WebTransport", "importScripts",
  "Worker", "SharedWorker", "BroadcastChannel", "caches", "indexedDB", "navigator",
  "webkitRequestFileSystem", "webkitRequestFileSystemSync",
  "webkitResolveLocalFileSystemURL", "webkitResolveLocalFileSystemSyncURL",
];

let python = null, dropped = null;

async function bytes(base, name) {
  const response = await fetch(base + name);
  if (!response.ok) throw new Error(`${name} cannot be loaded: ${response.status}`);
  return response.arrayBuffer();
}

async function load({ base, wheel }) {
  const { loadPyodide } = await import(`${base}pyodide/pyodide.mjs`);
  const archives = ["packages/kvcore.zip", `packages/${wheel}`].map((name) => bytes(base, name));
  python = await loadPyodide({ indexURL: `${base}pyodide/` });
  const extractDir = python.runPython("import site; site.getsitepackages()[0]");
  for (const archive of archives) python.unpackArchive(await archive, "zip", { extractDir });
  // A policy is imported from the same file at each run; one compiled a second ago may be stale.
  python.runPython("import sys, importlib; sys.dont_write_bytecode = True; importlib.invalidate_caches()");
  python.pyimport("kvcore_judge.workbench");
  for (let scope = self; scope; scope = Object.getPrototypeOf(scope)) CLOSED.forEach((name) => delete scope[name]);
  postMessage({ kind: "ready" });
}

// The file on which policies are run, in place of the one before.
function keep({ name, data }) {
  if (dropped) python.FS.unlink(dropped);
  dropped = null;
  // What has been read of a file is kept by its path.
  python.pyimport("kvcore_judge.workbench").forget();
  const path = `dropped/${name.replace(/[^A-Za-z0-9._-]/g, "_")}`;
  python.FS.mkdirTree("dropped");
  python.FS.writeFile(path, new Uint8Array(data), { canOwn: true });
  dropped = path;
}

function run({ source, choice, limit }) {
  const began = performance.now();
  const answer = python.pyimport("kvcore_judge.workbench").answer;
  const report = (text, done, total) => postMessage({ kind: "progress", text, done, total });
  const result = answer(source, choice || dropped, limit ?? undefined, report);
  const dict = result.toJs({ dict_converter: Object.fromEntries });
  result.destroy();
  postMessage({ kind: "result", result: dict, seconds: (performance.now() - began) / 1000 });
}

async function answer({ data }) {
  try {
    await { load, keep, run }[data.kind](data);
  } catch (error) {
    postMessage({ kind: "broken", text: String(error.message ?? error) });
  }
}

// One after another: a run may be asked for while Python is loaded.
let last = Promise.resolve();
onmessage = (event) => {
  last = last.then(() => answer(event));
};
