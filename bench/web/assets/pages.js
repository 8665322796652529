// runs/run.html?RUN_ID: finds the run's page in its pack (bench/report/site/packed_pages.py) and becomes it.
"use strict";
(async function () {
  const id = decodeURIComponent(location.search.slice(1));
  const message = document.getElementById("message"), say = (words) => (message.textContent = words);
  let pack = 0;
  for (const byte of new TextEncoder().encode(id)) pack = (pack * 31 + byte) % 256;
  const script = document.createElement("script");
  script.src = String(pack).padStart(3, "0") + ".js";
  const isThere = new Promise((done) => { script.onload = () => done(true); script.onerror = () => done(false); });
  document.head.append(script);
  const pages = (await isThere) ? await unpacked(window.packed) : {};
  if (!Object.hasOwn(pages, id)) {
    return say("There is no page of " + (id || "a run without an id") + " here. " + message.dataset.limits.replace("{}", id || "RUN"));
  }
  document.open();
  document.write(pages[id]); // its own policy allows no script of a record's
  document.close();

  async function unpacked(words) {
    const bytes = Uint8Array.from(atob(words), (char) => char.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }
})();
