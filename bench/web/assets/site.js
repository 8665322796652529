// The list of runs: Tabulator over the page's JSON block "runs-data"; two ticked runs are set side by side.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("runs-data").textContent);
  const numbers = { val_loss: 4, train_s: 2, step_avg_ms: 2, tokens_per_s: 0, mfu: 3, peak_mem_gib: 2, num_steps: 0, seed: 0, world_size: 0, num_deviations: 0 };
  const hidden = new Set(["model", "optim", "num_deviations", "target_reached", "commit", "config_id", "session_id", "comparability_id", "world_size", "num_steps", "race_id", "arm"]);
  const lowerIsBetter = new Set(["val_loss", "train_s", "step_avg_ms", "peak_mem_gib"]);
  const rows = data.rows.map((cells) => Object.fromEntries(cells.map((value, number) => [data.columns[number], value])));
  const show = (column, value) => (value == null ? "–" : column in numbers && typeof value === "number" ? value.toLocaleString("en", { minimumFractionDigits: numbers[column], maximumFractionDigits: numbers[column] }) : String(value));

  function matches(wanted, value) { // ">3", "<= 92.5", "=7", else a part of the words
    const found = /^\s*(<=|>=|<|>|=)\s*(-?[\d.]+(?:e-?\d+)?)\s*$/i.exec(wanted);
    if (!found) return String(value == null ? "" : value).toLowerCase().includes(String(wanted).toLowerCase().trim());
    if (value == null) return false;
    const bound = Number(found[2]);
    return { "<": value < bound, ">": value > bound, "<=": value <= bound, ">=": value >= bound, "=": value === bound }[found[1]];
  }

  function link(cell) {
    const id = cell.getValue();
    if (!Object.hasOwn(data.pages, id)) return document.createTextNode(String(id));
    const a = document.createElement("a");
    a.href = data.pages[id];
    a.textContent = id;
    return a;
  }

  function word(column) {
    return (cell) => document.createTextNode(show(column, cell.getValue()));
  }

  const columns = [{ formatter: "rowSelection", headerSort: false, width: 44, hozAlign: "center", frozen: true }].concat(
    data.columns.map((column) => ({
      title: column, field: column, visible: !hidden.has(column), headerFilter: "input", headerFilterFunc: matches,
      headerFilterParams: { elementAttributes: { "aria-label": "filter " + column } }, formatter: column === "run_id" ? link : word(column),
      sorter: column in numbers ? "number" : "string", sorterParams: { alignEmptyValues: "bottom" },
      hozAlign: column in numbers ? "right" : "left", minWidth: column === "run_id" ? 330 : 90,
    })),
  );
  const table = new Tabulator("#runs", {
    data: rows, columns, index: "run_id", height: Math.max(320, Math.min(680, innerHeight * 0.65)), layout: "fitData",
    selectableRows: 2, selectableRowsRollingSelection: true, selectableRowsPersistence: true, placeholder: "no run matches these filters",
    initialSort: [{ column: "started_at", dir: "desc" }],
  });
  const shown = document.getElementById("shown");
  table.on("dataFiltered", (filters, found) => (shown.textContent = found.length + " of " + rows.length + " runs"));
  table.on("tableBuilt", () => { // by keyboard as by mouse: Tab to a head, Enter or Space sorts, again turns it round
    for (const column of table.getColumns().filter((one) => one.getField())) {
      const head = column.getElement();
      head.tabIndex = 0;
      head.addEventListener("keydown", (event) => {
        if (event.target !== head || (event.key !== "Enter" && event.key !== " ")) return;
        event.preventDefault();
        const now = table.getSorters().find((sorter) => sorter.field === column.getField());
        table.setSort(column.getField(), now && now.dir === "asc" ? "desc" : "asc");
      });
    }
  });
  document.getElementById("clear").addEventListener("click", () => table.clearHeaderFilter());

  const pair = document.getElementById("pair");
  const cell = (name, words, kind) => {
    const element = document.createElement(name);
    element.textContent = words;
    if (kind) element.className = kind;
    return element;
  };

  function change(column, a, b) {
    if (!(column in numbers) || typeof a !== "number" || typeof b !== "number" || a === 0 || column === "seed") return a === b ? "" : "differs";
    const pct = 100 * (b / a - 1);
    return (pct >= 0 ? "+" : "") + pct.toFixed(2) + " %";
  }

  table.on("rowSelectionChanged", (selected) => {
    pair.replaceChildren();
    if (selected.length !== 2) {
      pair.textContent = selected.length ? "Tick one more." : "Tick two runs above.";
      return;
    }
    const [a, b] = selected.slice().sort((one, other) => (one.started_at < other.started_at ? -1 : 1));
    const body = document.createElement("table");
    const head = document.createElement("tr");
    ["", "A, the earlier", "B", "B against A"].forEach((words) => head.append(cell("th", words)));
    body.append(head);
    for (const column of data.columns) {
      const line = document.createElement("tr");
      const words = change(column, a[column], b[column]);
      const better = lowerIsBetter.has(column) && words.endsWith("%") ? (a[column] > b[column] ? "good" : a[column] < b[column] ? "bad" : "") : "";
      line.append(cell("td", column), cell("td", show(column, a[column]), "number"), cell("td", show(column, b[column]), "number"), cell("td", words, "number " + better));
      body.append(line);
    }
    const comparable = a.comparability_id && a.comparability_id === b.comparability_id && a.session_id === b.session_id;
    const advice = comparable ? "Same session and machine, but one run a side gives no verdict about speed. " : "Other machine, software or session: their times are not comparable. ";
    pair.append(cell("p", advice), cell("code", "./run.sh compare " + a.run_id + " " + b.run_id), body);
  });
})();
