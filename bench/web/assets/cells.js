// What a run looks like on the results site: its numbers in words, badges, short id, card, and runs side by side.
"use strict";
const cells = (function () {
  const NUMBERS = { val_loss: 4, score: 5, train_s: 2, step_avg_ms: 2, tokens_per_s: 0, mfu: 3, peak_mem_gib: 2, energy_j: 0, num_steps: 0, step_ms_p50: 2, step_ms_p95: 2, compile_s: 2, wall_s: 1, seed: 0, world_size: 0, num_deviations: 0, num_params: 0, num_shards: 0, epochs: 2, mean_power_w: 1, throttled_frac: 3 }; // decimals; null: as it is, a setting
  const HEADLINE = ["val_loss", "train_s", "step_avg_ms", "tokens_per_s"];
  const MEANS = [...HEADLINE, "mfu", "peak_mem_gib", "energy_j", "mean_power_w"]; // of a group
  const LOWER_IS_BETTER = ["val_loss", "train_s", "step_avg_ms", "peak_mem_gib", "energy_j"];
  const TITLES = { started_at: "date", run_id: "run" };
  const SHORTER = { started_at: (value) => String(value).slice(0, 16).replace("T", " "), device: (value) => String(value).replace("NVIDIA ", "") };
  const MAX_SIDE_BY_SIDE = 6;

  function make(name, attributes, ...children) { // text, never markup
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) if (value != null) element.setAttribute(key, value);
    element.append(...children.filter((child) => child != null));
    return element;
  }

  const number = (field, value) => NUMBERS[field] === null ? String(value) : value.toLocaleString("en", { minimumFractionDigits: NUMBERS[field], maximumFractionDigits: NUMBERS[field] });
  const show = (field, value) => (value == null ? "–" : field in NUMBERS && typeof value === "number" ? number(field, value) : (SHORTER[field] || String)(value));
  const title = (field) => TITLES[field] || field;

  function badges(row) {
    const COLOURS = { valid: "good", suspect: "doubt", invalid: "bad", failed: "bad", aborted: "bad", stopped: "doubt", damaged: "bad" };
    const isImported = row.provenance === "imported"; // its numbers are those of a log: nothing here vouches for them
    const words = [row.status !== "complete" ? row.status : isImported && row.validity === "valid" ? null : row.validity];
    if (row.num_deviations) words.push("open");
    if (isImported) words.push("imported");
    return make("span", { class: "badges", title: row.why }, ...words.filter(Boolean).map((word) => make("span", { class: "badge " + (COLOURS[word] || "soft") }, word)));
  }

  function idOf(row) { // short; what is copied is the whole
    const words = row.page ? make("a", { href: row.page }, row.short) : make("span", {}, row.short);
    const id = make("span", { class: "id", title: row.run_id, "data-full": row.run_id }, words);
    const button = make("button", { type: "button", class: "copy", "aria-label": "copy the run id " + row.run_id, title: "copy " + row.run_id });
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      getSelection().selectAllChildren(id);
      button.classList.toggle("copied", document.execCommand("copy"));
      getSelection().removeAllRanges();
      setTimeout(() => button.classList.remove("copied"), 1500);
    });
    return make("span", { class: "run" }, id, button);
  }

  document.addEventListener("copy", (event) => {
    const parts = [getSelection().anchorNode, getSelection().focusNode].map((node) => node && (node.nodeType === 1 ? node : node.parentElement).closest(".id"));
    if (!parts[0] || parts[0] !== parts[1]) return;
    event.clipboardData.setData("text/plain", parts[0].dataset.full);
    event.preventDefault();
  });

  function card(cell) {
    const row = cell.getData();
    const facts = HEADLINE.map((field) => make("div", {}, make("dt", {}, field), make("dd", {}, show(field, row[field]))));
    const where = [row.name, row.device, show("started_at", row.started_at)].filter(Boolean).join(" · ");
    return make("div", { class: "card" }, make("div", {}, idOf(row), " ", badges(row)), make("dl", {}, ...facts), make("div", { class: "soft" }, where));
  }

  // ---- groups: repeats, as ./run.sh table --group has them

  function meanOf(field, members) {
    const values = members.filter((row) => row.counts && row[field] != null).map((row) => row[field]);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const sd = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
    return { mean: values.length ? mean : null, sd: values.length > 1 ? sd : null };
  }

  function meanWords(field, members) {
    const { mean, sd } = meanOf(field, members);
    return mean == null ? "" : number(field, mean) + (sd == null ? "" : " ± " + Number(sd.toPrecision(2)).toLocaleString("en", { maximumFractionDigits: 9 }));
  }

  const ofGroup = (members) => ({ n: members.filter((row) => row.counts).length, first: members.find((row) => row.counts) || members[0] });

  // ---- runs side by side

  function change(field, first, value) {
    if (!MEANS.includes(field) || first == null || value == null || !first || first === value) return null;
    const pct = 100 * (value / first - 1);
    const colour = LOWER_IS_BETTER.includes(field) ? (pct < 0 ? "good" : "bad") : "soft";
    return make("span", { class: colour }, " (" + (pct >= 0 ? "+" : "") + pct.toFixed(2) + " %)");
  }

  function sideBySide(found, fields) {
    const count = found.length;
    found = found.slice(0, MAX_SIDE_BY_SIDE);
    const differing = fields.filter((field) => !["run_id", "validity"].includes(field) && new Set(found.map((row) => row[field])).size > 1);
    const head = make("tr", {}, make("th", {}, ""), ...found.map((row) => make("th", {}, idOf(row))));
    const lines = differing.map((field) => make("tr", {}, make("td", {}, title(field)), ...found.map((row, number) => make("td", { class: field in NUMBERS ? "number" : null }, show(field, row[field]), number ? change(field, found[0][field], row[field]) : null))));
    const alike = found.every((row) => row.comparability_id && row.comparability_id === found[0].comparability_id && row.session_id === found[0].session_id);
    const advice = alike ? "Same session and machine, but one run per side gives no verdict about speed." : "Other machine, software or session: their times are not comparable.";
    const more = count > found.length ? " The first " + found.length + " of " + count + "." : "";
    const command = found.length === 2 ? [make("p", {}, make("code", {}, "./run.sh compare " + found.map((row) => row.run_id).join(" ")))] : [];
    return [make("h2", {}, "The ticked runs"), make("p", {}, advice + " What differs, against the earliest:" + more), ...command, make("div", { class: "scroll", tabindex: "0" }, make("table", {}, head, ...lines))];
  }

  return { NUMBERS, HEADLINE, MEANS, make, show, title, badges, idOf, card, meanOf, meanWords, ofGroup, sideBySide };
})();
