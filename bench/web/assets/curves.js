// The overlay of curves: which runs, against what, grouped how; all of it stands in the address.
// The page's JSON block "curves" lists the runs; their curves are in it, or in files that call addCurves(), loaded when asked for.
"use strict";
(function () {
  const MAX_DRAWN = 200, MAX_LISTED = 100, NUM_FIRST = 6;
  const X = { step: ["step", "step"], time: ["train_s", "train time, s"], tokens: ["tokens", "tokens"] };
  const Y = { val_loss: ["val", "val_loss, nats per token"], train_loss: ["train", "train_loss, nats per token"], step_ms: ["train", "step time, ms"] };
  const BAND = { range: "the band is from the smallest to the largest run", sd: "the band is one standard deviation each way", none: "no band" };
  const FROM = { all: 0, half: 0.5, tenth: 0.9 };
  const index = JSON.parse(document.getElementById("curves").textContent);
  for (const [name, label] of Object.entries(index.goals)) Y[name] = ["val", label];
  const runs = index.rows.map((cells) => Object.fromEntries(cells.map((value, number) => [index.columns[number], value])));
  const byId = new Map(runs.map((run) => [run.run_id, run])), curves = new Map(), loading = new Map();
  const find = (id) => document.getElementById(id);
  const controls = ["y", "x", "group", "band", "smooth", "from", "yscale", "xscale"].map((id) => find(id));
  let chosen = new Set();

  const make = (name, facts, ...children) => {
    const element = Object.assign(document.createElement(name), facts);
    element.append(...children);
    return element;
  };
  const count = (num, word) => num + " " + word + (num === 1 ? "" : "s");
  const known = (value, digits) => (value == null ? "–" : value.toFixed(digits));

  // ---- the address

  function meant(word) { // a run id, or a part of run ids or of races: warm-up runs only by their whole id
    if (byId.has(word)) return [word];
    return word ? runs.filter((run) => run.status !== "warm-up" && [run.run_id, run.arm].join(" ").includes(word)).map((run) => run.run_id) : [];
  }

  function first() { // the newest race, else the newest runs
    if (index.arms) return runs.map((run) => run.run_id);
    const complete = runs.filter((run) => run.status === "complete");
    const arm = complete.length && complete[0].arm, race = arm && arm.slice(0, arm.lastIndexOf(":") + 1);
    return (race ? complete.filter((run) => run.arm && run.arm.startsWith(race)) : complete).slice(0, race ? MAX_DRAWN : NUM_FIRST).map((run) => run.run_id);
  }

  function readAddress() {
    const words = new URLSearchParams(location.hash.slice(1));
    chosen = new Set(words.has("runs") ? words.get("runs").split(",").flatMap(meant) : first());
    for (const control of controls) {
      const wanted = words.get(control.id);
      control.value = [...control.options].some((option) => option.value === wanted) ? wanted : control.options[0].value;
    }
    if (!words.has("group") && [...chosen].some((id, _, all) => all.length > 1 && byId.get(id).arm)) find("group").value = "arm";
    show();
  }

  function writeAddress() {
    const words = controls.filter((control) => control.value !== control.options[0].value || control.id === "group").map((control) => control.id + "=" + control.value);
    const isDefault = chosen.size === first().length && first().every((id) => chosen.has(id));
    if (!isDefault || !index.arms) words.unshift("runs=" + [...chosen].map(encodeURIComponent).join(","));
    history.replaceState(null, "", "#" + words.join("&"));
  }

  // ---- curves

  function add(some) {
    for (const [id, one] of Object.entries(some)) curves.set(id, one);
  }

  let added = Promise.resolve();
  globalThis.addCurves = (words) => { // a file of a site calls this, with JSON, deflated, in base64
    const bytes = Uint8Array.from(atob(words), (char) => char.charCodeAt(0));
    const one = new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json().then(add);
    added = Promise.all([added, one]);
  };

  function load(run) { // a script element: a page of a file may not fetch
    if (curves.has(run.run_id) || run.file == null) return Promise.resolve();
    if (!loading.has(run.file)) loading.set(run.file, new Promise((done) => {
      const script = make("script", { src: "curves/" + index.files[run.file] + ".js", onload: () => done(added), onerror: done });
      document.head.append(script);
    }));
    return loading.get(run.file);
  }

  function smoothed(values, num) { // centred mean over num points, fewer at the ends
    const half = (num - 1) / 2;
    return num < 2 ? values : values.map((_, place) => {
      const reach = Math.min(half, place, values.length - 1 - place), some = values.slice(place - reach, place + reach + 1);
      return some.reduce((sum, one) => sum + one, 0) / some.length;
    });
  }

  function pointsOf(id) { // {x, y} of a run, as asked for
    const one = curves.get(id), x = one && one[Y[find("y").value][0]][X[find("x").value][0]], y = one && one[Y[find("y").value][0]][find("y").value];
    if (!x || !y) return { x: [], y: [] };
    const isDrawn = (place) => x[place] != null && y[place] != null && (find("xscale").value !== "log" || x[place] > 0) && (find("yscale").value !== "log" || y[place] > 0);
    const places = x.map((_, place) => place).filter(isDrawn), ys = smoothed(places.map((place) => y[place]), Number(find("smooth").value));
    const xs = places.map((place) => x[place]), cut = xs[0] + FROM[find("from").value] * (xs[xs.length - 1] - xs[0]);
    return { x: xs.filter((one) => one >= cut), y: ys.filter((_, number) => xs[number] >= cut) };
  }

  // ---- groups

  const groupOf = {
    run: (run) => run.run_id,
    config: (run) => run.config_id || run.name || run.run_id,
    name: (run) => run.name || run.run_id,
    arm: (run) => run.arm || run.run_id,
  };

  function nameOf(run) {
    const name = (run.name || run.run_id) + (run.seed == null ? "" : " s" + run.seed);
    const alike = [...chosen].filter((id) => byId.get(id).name === run.name && byId.get(id).seed === run.seed).length > 1;
    return alike ? name + " " + run.run_id.slice(0, 16) + (run.run_id.startsWith("0000") ? run.run_id.slice(-11) : "") : name;
  }

  function groups() { // [{name, runs, counted}] in the order of their first run, of what is chosen
    const found = new Map();
    for (const run of runs.filter((one) => chosen.has(one.run_id)).reverse()) {
      const key = groupOf[find("group").value](run);
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(run);
    }
    const one = find("group").value, rank = (key) => ((index.arms || []).indexOf(key) + 1 || 1e9);
    const list = [...found].sort(([a], [b]) => (one === "arm" ? rank(a) - rank(b) || a.localeCompare(b) : 0));
    const races = new Set(list.map(([key]) => key.slice(0, key.lastIndexOf(":"))));
    return list.map(([key, all]) => {
      const complete = all.filter((run) => run.status === "complete"), counted = complete.length ? complete : all;
      const short = one === "arm" && all[0].arm && races.size === 1 ? key.slice(key.lastIndexOf(":") + 1) : one === "config" && all[0].config_id ? all[0].name + " " + key : key;
      const label = short.replace(/^\d{8}T\d{6}Z-/, ""); // of a race
      return { name: one === "run" || (one !== "name" && key === all[0].run_id) ? nameOf(all[0]) : label + (counted.length > 1 ? ", n=" + counted.length : ""), runs: all, counted };
    });
  }

  // ---- the page

  function drawn(list) {
    return list.map((group) => ({ name: group.name, runs: group.counted.map((run) => pointsOf(run.run_id)).filter((run) => run.x.length) })).filter((arm) => arm.runs.length);
  }

  function words(list, arms) {
    const said = [], every = Math.max(1, ...[...chosen].map((id) => (curves.has(id) ? curves.get(id).every : 1)));
    const chosenText = (id) => find(id).selectedOptions[0].textContent;
    if (arms.some((arm) => arm.runs.length > 1)) said.push("a line is the mean of a group's runs, of which one that has ended keeps its last value, " + BAND[find("band").value]);
    if (every > 1 && Y[find("y").value][0] === "train") said.push("a point is the mean of up to " + every + " steps");
    if (find("smooth").value !== "0") said.push("smoothed: " + chosenText("smooth"));
    const missing = list.flatMap((group) => group.counted).filter((run) => !pointsOf(run.run_id).x.length).length;
    if (missing) said.push("no " + chosenText("y") + " by " + chosenText("x") + " in " + count(missing, "run") + " of these");
    const uncounted = list.reduce((sum, group) => sum + group.runs.length - group.counted.length, 0);
    if (uncounted) said.push(count(uncounted, "run") + " not complete, or a race's warm-up, in no mean");
    if (chosen.size >= MAX_DRAWN) said.push("at most " + MAX_DRAWN + " runs are drawn");
    return said.join("; ");
  }

  function runLink(run, name) {
    return run.page ? make("a", { href: run.page.replace("{}", run.run_id), textContent: name }) : make("span", { textContent: name });
  }

  function table(list, arms) { // what is drawn: its colour, name, numbers, and the way to its page
    const body = find("chosen");
    body.replaceChildren();
    for (const group of list) {
      const number = arms.findIndex((arm) => arm.name === group.name);
      for (const run of group.runs) {
        const swatch = make("span", { className: "swatch" });
        const isCounted = group.counted.includes(run);
        swatch.style.background = number < 0 || !isCounted ? "transparent" : "var(--series-" + (number % 8) + ")";
        const away = make("button", { type: "button", textContent: "×", title: "remove from the chart" });
        away.setAttribute("aria-label", "remove " + nameOf(run));
        away.addEventListener("click", () => change(() => chosen.delete(run.run_id)));
        const numbers = [[run.score, 4], [run.train_s, 2]].map(([value, digits]) => make("td", { className: "number", textContent: known(value, digits) }));
        const words = [group.runs.length > 1 && isCounted ? group.name : "", run.status].map((word) => make("td", { textContent: word }));
        body.append(make("tr", {}, make("td", {}, swatch, runLink(run, nameOf(run))), ...numbers, make("td", {}, away), ...words));
      }
    }
  }

  function picker() { // the newest runs that have all the words, chosen or not
    const wanted = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => wanted.every((word) => [run.run_id, run.name, run.track, run.arm, run.config_id, run.status].join(" ").toLowerCase().includes(word)));
    const box = (run) => {
      const tick = make("input", { type: "checkbox", checked: chosen.has(run.run_id) });
      tick.addEventListener("change", () => change(() => (tick.checked ? chosen.add(run.run_id) : chosen.delete(run.run_id))));
      const facts = [run.arm && run.arm.replace(/^.*Z-/, ""), run.status === "complete" ? run.metric + " " + known(run.score, 4) : run.status].filter(Boolean).join(", ");
      return make("li", {}, make("label", {}, tick, " ", make("code", { textContent: run.run_id }), make("span", { className: "soft", textContent: " " + facts })));
    };
    find("found").replaceChildren(...found.slice(0, MAX_LISTED).map(box));
    find("number").textContent = count(found.length, "run") + (found.length > MAX_LISTED ? ", the newest " + MAX_LISTED + " listed" : "");
    find("add").textContent = "Add " + (Math.min(found.length, MAX_LISTED) === 1 ? "it" : "these " + Math.min(found.length, MAX_LISTED));
    find("add").onclick = () => change(() => found.slice(0, MAX_LISTED).forEach((run) => chosen.add(run.run_id)));
  }

  async function show() {
    chosen = new Set([...chosen].slice(0, MAX_DRAWN));
    await Promise.all([...chosen].map((id) => load(byId.get(id))));
    const list = groups(), arms = drawn(list), place = document.querySelector("[data-chart=overlay]"), caption = place.parentNode.querySelector("figcaption");
    const title = find("y").selectedOptions[0].textContent + " by " + find("x").selectedOptions[0].textContent;
    caption.querySelector("b").textContent = title;
    caption.querySelector("span").textContent = words(list, arms);
    const spec = { x_label: X[find("x").value][1], y_label: Y[find("y").value][1], arms, band: find("band").value, log_x: find("xscale").value === "log", log_y: find("yscale").value === "log", height: innerWidth < 500 ? 320 : 460 };
    place.replaceChildren();
    if (!charts.draw(place, spec)) place.textContent = chosen.size ? "None of the chosen runs has these values: choose another x or y." : "No run is chosen: tick some below.";
    place.setAttribute("aria-label", title + " of " + arms.map((arm) => arm.name).join(", "));
    table(list, arms);
    picker();
  }

  function change(act) {
    act();
    writeAddress();
    show();
  }

  if (index.curves) add(index.curves);
  for (const control of controls) control.addEventListener("change", () => change(() => {}));
  find("search").addEventListener("input", picker);
  find("clear").addEventListener("click", () => change(() => chosen.clear()));
  addEventListener("hashchange", readAddress);
  readAddress();
})();
