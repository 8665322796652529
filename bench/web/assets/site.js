// The list of runs: Tabulator over the page's JSON block "runs-data".  What is seen (filters, sort, columns, grouping,
// ticks) is in the address after #, so that a link, a reload and Back show the same.
"use strict";
(function () {
  const { NUMBERS, HEADLINE, MEANS, make, show, title, badges, idOf, card, meanOf, meanWords, ofGroup, sideBySide } = cells;
  const packed = JSON.parse(document.getElementById("runs-data").textContent);
  const WIDTHS = { val_loss: 92, train_s: 92, step_avg_ms: 122, tokens_per_s: 122, started_at: 144, run_id: 190, status: 150, why: 260, certificate: 180 };
  const HIDDEN = ["short", "group", "counts", "page"]; // of each row, in no column
  const rows = unpacked(packed.columns);
  const fields = Object.keys(packed.columns).filter((field) => !HIDDEN.includes(field));
  const settings = fields.filter((field) => field.includes(".")); // of the config, those in which runs differ
  for (const field of settings) if (rows.every((row) => row[field] == null || typeof row[field] === "number")) NUMBERS[field] = null;
  const hasTracks = new Set(rows.map((row) => row.track)).size > 1;
  const FEW = 4; // settings that are shown unasked: runs that differ in more are no sweep
  const FIRST = [...HEADLINE, ...(settings.length <= FEW ? settings : []), "name", ...(hasTracks ? ["track"] : []), "device", "started_at", "run_id", "status", "certificate"].filter((field) => rows.some((row) => row[field] != null));
  const narrow = matchMedia("(max-width: 40rem)");
  const $ = (id) => document.getElementById(id);

  function unpacked(columns) { // {column: its values, or codes of them} -> rows
    const rows = [];
    for (const [name, { values, codes }] of Object.entries(columns)) {
      const count = (codes || values).length;
      for (let key = 0; key < count; key++) (rows[key] = rows[key] || { key })[name] = codes ? values[codes[key]] : values[key];
    }
    return rows;
  }

  function matches(wanted, value) { // ">3", "<= 92.5", "=7", else a part of the words
    const found = /^\s*(<=|>=|<|>|=)\s*(-?[\d.]+(?:e-?\d+)?)\s*$/i.exec(wanted);
    if (!found) return String(value == null ? "" : value).toLowerCase().includes(String(wanted).toLowerCase().trim());
    if (value == null) return false;
    const bound = Number(found[2]);
    return { "<": value < bound, ">": value > bound, "<=": value <= bound, ">=": value >= bound, "=": value === bound }[found[1]];
  }

  // ---- the table

  function groupHead(key, count, members, group) {
    const { n, first } = ofGroup(members);
    const others = count - n ? ", " + (count - n) + " not counted" : "";
    const button = make("button", { type: "button", "data-group": key, "aria-expanded": String(group.isVisible()) }, key < 0 ? "damaged records" : first.name || "unnamed", " ", make("code", {}, first.config_id || ""));
    const head = make("span", { class: "group", role: "gridcell" }, button, make("span", { class: "soft" }, [" n = " + n + others, first.device, first.source && "code " + first.source].filter(Boolean).join(" · ")));
    if (narrow.matches) head.append(make("div", { class: "soft" }, HEADLINE.filter((field) => meanWords(field, members)).map((field) => field + " " + meanWords(field, members)).join(", ")));
    return head;
  }


  const byDate = (one, other, a, b, column, dir) => (one === other ? 0 : one == null || other == null ? ((one == null) === (dir === "asc") ? 1 : -1) : one < other ? -1 : 1);
  const sorter = (field) => (field === "started_at" ? byDate : field in NUMBERS ? "number" : "string"); // a locale's order of 10,000 dates takes long
  const formatters = { run_id: (cell) => idOf(cell.getData()), status: (cell) => badges(cell.getData()) };
  const column = (field) => ({
    title: title(field), field, headerFilter: "input", headerFilterFunc: matches, headerFilterLiveFilterDelay: 150,
    headerFilterParams: { elementAttributes: { "aria-label": "filter " + title(field) } }, sorter: sorter(field), sorterParams: { alignEmptyValues: "bottom" },
    formatter: formatters[field] || ((cell) => make("span", { title: field in NUMBERS ? null : cell.getValue() }, show(field, cell.getValue()))),
    hozAlign: field in NUMBERS ? "right" : "left", headerHozAlign: field in NUMBERS ? "right" : "left",
    width: WIDTHS[field], widthGrow: field === "name" ? 2 : 1, minWidth: WIDTHS[field] || (field.includes(".") ? 40 + 8 * field.length : field in NUMBERS ? 96 : 100),
    ...(MEANS.includes(field) ? { topCalc: (values, members) => meanWords(field, members), topCalcFormatter: (cell) => make("span", { class: "mean" }, ...String(cell.getValue()).split(/(?= ±)/).map((words) => make("span", {}, words))) } : {}),
  });
  const state = read();
  const isShown = (field) => !narrow.matches && state.cols.includes(field);
  const table = new Tabulator("#runs", {
    data: rows, index: "key", layout: "fitColumns", nestedFieldSeparator: false, maxHeight: Math.max(360, innerHeight * 0.72), selectableRows: "highlight", selectableRowsPersistence: true,
    printAsHtml: true, printRowRange: "active", groupHeaderPrint: (...group) => groupHead(...group).outerHTML, // Tabulator sets it as HTML
    columns: [
      { formatter: "rowSelection", headerSort: false, width: 44, minWidth: 44, hozAlign: "center", title: "tick", print: false },
      { title: "runs", field: "short", formatter: card, visible: narrow.matches, headerSort: false, minWidth: 200, variableHeight: true },
      ...fields.map((field) => Object.assign(column(field), { visible: isShown(field) })),
    ],
    placeholder: "no run matches these filters", initialSort: state.sort.map((one) => ({ ...one })), initialHeaderFilter: Object.entries(state.filters).map(([field, value]) => ({ field, value })),
    columnCalcs: "group", groupBy: state.group ? "group" : false, groupStartOpen: false, groupToggleElement: "header", groupClosedShowCalcs: true, groupHeader: groupHead,
    columnDefaults: { tooltip: false },
  });
  const searched = (row) => !state.q || fields.some((field) => row[field] != null && String(row[field]).toLowerCase().includes(state.q.toLowerCase()));

  // ---- what is seen, in the address

  function read() {
    const words = new URLSearchParams(location.hash.slice(1));
    const sort = words.get("sort") || "-started_at";
    const field = sort.replace(/^-/, "");
    const cols = (words.get("cols") || "").split(",").filter((name) => fields.includes(name));
    const filters = [...words].filter(([key]) => key.startsWith("f.") && fields.includes(key.slice(2))).map(([key, value]) => [key.slice(2), value]);
    return {
      q: words.get("q") || "", sort: [{ column: fields.includes(field) ? field : "started_at", dir: sort.startsWith("-") ? "desc" : "asc" }], cols: cols.length ? cols : FIRST,
      group: words.get("group") === "config", filters: Object.fromEntries(filters), ticked: (words.get("ticked") || "").split(",").filter(Boolean),
    };
  }

  function hash() {
    const words = new URLSearchParams();
    const [{ column, dir }] = state.sort;
    if (state.q) words.set("q", state.q);
    if (column !== "started_at" || dir !== "desc") words.set("sort", (dir === "desc" ? "-" : "") + column);
    for (const [field, value] of Object.entries(state.filters)) words.set("f." + field, value);
    if (state.cols.join() !== FIRST.join()) words.set("cols", state.cols.join());
    if (state.group) words.set("group", "config");
    if (state.ticked.length) words.set("ticked", state.ticked.join());
    return "#" + words.toString().replaceAll("%2C", ",");
  }

  let isRestoring = true;
  function save(isStep) { // a step can be gone back; typing and ticking are none
    if (isRestoring || hash() === (location.hash || "#")) return;
    history[isStep ? "pushState" : "replaceState"](null, "", hash());
  }

  function restore() {
    isRestoring = true;
    Object.assign(state, read());
    for (const field of fields) table.setHeaderFilterValue(field, state.filters[field] || "");
    table.setSort(state.sort.map((one) => ({ ...one })));
    table.setGroupBy(state.group ? "group" : false);
    table.deselectRow();
    tick();
    arrange();
    $("q").value = state.q;
    search();
    isRestoring = false;
    ticked(table.getSelectedData());
  }

  const tick = () => table.selectRow(rows.filter((row) => state.ticked.includes(row.run_id)).map((row) => row.key));
  const search = () => (state.q ? table.setFilter(searched) : table.clearFilter());

  function arrange() { // which columns show, and what the bar says of it
    document.body.classList.toggle("narrow", narrow.matches);
    table[narrow.matches ? "showColumn" : "hideColumn"]("short");
    for (const field of fields) {
      table[isShown(field) ? "showColumn" : "hideColumn"](field);
      $("column-" + field).checked = state.cols.includes(field);
    }
    $("group").checked = state.group;
    $("sort").value = (state.sort[0].dir === "desc" ? "-" : "") + state.sort[0].column;
  }

  // ---- the bar

  function choose(field, isOn) {
    state.cols = fields.filter((one) => (one === field ? isOn : state.cols.includes(one)));
    if (!isOn && state.filters[field]) table.setHeaderFilterValue(field, ""); // no filter that cannot be seen
    arrange();
    save(true);
  }

  function bar() {
    const on = (element, kind, react) => (element.addEventListener(kind, react), element);
    const button = (words, react, id) => on(make("button", { type: "button", id }, words), "click", react);
    const check = (id, words, react) => { const box = on(make("input", { type: "checkbox", id }), "change", () => react(box.checked)); return make("label", {}, box, " ", words); };
    const sorts = [...HEADLINE.flatMap((field) => (field === "tokens_per_s" ? ["-" + field] : [field])), "-started_at", "started_at", "name"];
    const order = (sort) => (sort.endsWith("started_at") ? (sort.startsWith("-") ? ", newest first" : ", oldest first") : sort.startsWith("-") ? ", largest first" : "");
    const options = sorts.map((sort) => make("option", { value: sort }, title(sort.replace("-", "")) + order(sort)));
    const menu = make("details", { class: "menu" }, make("summary", {}, "Columns"), make("div", {}, ...fields.map((field) => check("column-" + field, title(field), (isOn) => choose(field, isOn)))));
    on(menu, "keydown", (event) => { if (event.key === "Escape") { menu.open = false; menu.firstChild.focus(); } });
    document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
    $("bar").append(
      on(make("input", { id: "q", type: "search", placeholder: "Search all columns", "aria-label": "search all columns", value: state.q }), "input", (event) => { state.q = event.target.value; search(); save(); }),
      check("group", "Group by config", (isOn) => { state.group = isOn; table.setGroupBy(isOn ? "group" : false); save(true); }), menu,
      make("label", { class: "sorting" }, "Sort ", on(make("select", { id: "sort" }, ...options), "change", (event) => table.setSort(event.target.value.replace("-", ""), event.target.value.startsWith("-") ? "desc" : "asc"))),
      button("CSV", () => save_file("csv"), "csv"), button("JSON", () => save_file("json"), "json"),
      button("Reset", () => { history.pushState(null, "", "#"); restore(); }, "reset"), make("span", { id: "shown", role: "status" }), make("span", { id: "of-ticked" }),
    );
  }

  // ---- a file of what is seen: these rows in this order, these columns, unrounded

  function seen() {
    const of = (row, names) => Object.fromEntries(names.map((field) => [field, row[field]]));
    if (!state.group) return table.getRows("active").map((row) => of(row.getData(), state.cols));
    const shared = state.cols.filter((field) => !(field in NUMBERS) && !["run_id", "started_at", "status", "validity", "why"].includes(field));
    return table.getGroups().map((group) => {
      const members = group.getRows().map((row) => row.getData());
      const { n, first } = ofGroup(members);
      const means = MEANS.filter((field) => state.cols.includes(field)).flatMap((field) => Object.entries(meanOf(field, members)).map(([what, value]) => [field + "_" + what, value]));
      return { ...of(first, [...new Set([...shared, "config_id"])]), n, ...Object.fromEntries(means), run_ids: members.map((row) => row.run_id) };
    });
  }

  function save_file(kind) {
    const found = seen();
    const names = found.length ? Object.keys(found[0]) : state.cols;
    const quoted = (value) => (value == null ? "" : /[",\n\r]/.test(String(value)) ? '"' + String(value).replaceAll('"', '""') + '"' : String(value));
    const lines = [names.join(), ...found.map((row) => names.map((name) => quoted(Array.isArray(row[name]) ? row[name].join(" ") : row[name])).join())];
    const text = kind === "csv" ? lines.join("\n") + "\n" : JSON.stringify(found, null, 1) + "\n";
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: kind === "csv" ? "text/csv" : "application/json" })), download: "runs." + kind });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // ---- the ticked runs

  function ticked(found) {
    found = found.slice().sort((one, other) => String(one.started_at).localeCompare(String(other.started_at)));
    state.ticked = found.map((row) => row.run_id);
    save();
    const runs = found.length ? "#runs=" + state.ticked.map(encodeURIComponent).join(",") : "";
    $("of-ticked").replaceChildren(found.length ? found.length + " ticked " : "", make("a", { href: "curves.html" + runs, id: "curves" }, "Curves"));
    $("ticked").replaceChildren(...(found.length > 1 ? sideBySide(found, fields) : []));
  }

  // ---- events

  bar();
  table.on("dataFiltered", (filters, found) => {
    $("shown").textContent = found.length.toLocaleString("en") + " of " + rows.length.toLocaleString("en") + " runs";
    if (!isRestoring) state.filters = Object.fromEntries(table.getHeaderFilters().map((filter) => [filter.field, filter.value]));
    save();
  });
  table.on("dataSorted", (sorters) => {
    if (isRestoring || !sorters.length) return;
    state.sort = [{ column: sorters[0].field, dir: sorters[0].dir }];
    $("sort").value = (sorters[0].dir === "desc" ? "-" : "") + sorters[0].field;
    save(true);
  });
  table.on("rowSelectionChanged", (found) => isRestoring || ticked(found));
  table.on("renderComplete", () => document.querySelectorAll("#runs .tabulator-group").forEach((one) => one.setAttribute("role", "row")));
  table.on("groupVisibilityChanged", (group, isVisible) => {
    const button = document.querySelector('#runs [data-group="' + group.getKey() + '"]');
    if (button) button.setAttribute("aria-expanded", String(isVisible));
  });
  table.on("tableBuilt", () => { // by keyboard as by mouse: Tab to a head, Enter or Space sorts, again turns it round
    for (const one of table.getColumns().filter((column) => column.getField())) {
      const head = one.getElement();
      head.tabIndex = 0;
      head.addEventListener("keydown", (event) => {
        if (event.target !== head || (event.key !== "Enter" && event.key !== " ")) return;
        event.preventDefault();
        table.setSort(one.getField(), state.sort[0].column === one.getField() && state.sort[0].dir === "asc" ? "desc" : "asc");
      });
    }
    document.querySelector("#runs .tabulator-tableholder").removeAttribute("tabindex"); // its cells take the focus, and a grid has only rows
    search();
    arrange();
    tick();
    isRestoring = false;
    ticked(table.getSelectedData());
  });
  narrow.addEventListener("change", arrange);
  addEventListener("popstate", restore);
})();
