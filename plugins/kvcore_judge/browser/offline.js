// Keeps all files of this version of the site, and answers from them. VERSION and FILES are above.

const NAME = `kvcore ${registration.scope} `;

addEventListener("install", (event) => {
  const wanted = FILES.map((name) => new Request(name, { cache: "no-cache" }));
  event.waitUntil(caches.open(NAME + VERSION).then((kept) => kept.addAll(wanted)).then(() => skipWaiting()));
});

addEventListener("activate", (event) => {
  const old = (names) => names.filter((name) => name.startsWith(NAME) && name !== NAME + VERSION);
  const clear = async () => Promise.all(old(await caches.keys()).map((name) => caches.delete(name)));
  event.waitUntil(clear().then(() => clients.claim()));
});

addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET" || !request.url.startsWith(registration.scope)) return;
  const answer = async () => {
    const kept = await caches.open(NAME + VERSION);
    return (await kept.match(request, { ignoreSearch: true })) ?? fetch(request);
  };
  event.respondWith(answer());
});
