// Draws chart specs (bench/web/chart.py) with uPlot: those of the page's JSON block "charts", and what charts.draw() is given.
// Arrow keys move the cursor, Enter opens a point's link; drag over a chart to zoom, double click to see all of it.
"use strict";
(function () {
  const HOUR_S = 3600, WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const NEAR_PX = 14; // of a point that a click means
  const drawn = new Map(); // place: plot
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ofSeries = (number) => colour("--series-" + (number % 8));
  const dashOf = (number) => [[], [8, 4], [2, 3], [12, 4, 2, 4]][Math.floor(number / 8) % 4]; // from the ninth series on
  const narrow = (value) => (value == null ? "–" : Math.abs(value) >= 1e5 ? value.toExponential(3) : String(+value.toPrecision(5)));
  const isKnown = (value) => value != null;

  // ---- series

  function stacked(series) { // areas are drawn from the highest sum down, so that each covers what is below it
    const sums = series[0].y.map(() => 0);
    return series.map((one) => one.y.map((value, place) => (value == null ? null : (sums[place] += value))));
  }

  function dots(one, fill) { // few have an edge in the colour of the page, which parts those that touch; of many it would hide most
    const num = one.y.filter(isKnown).length, size = num <= 60 ? 10 : num <= 400 ? 7 : num <= 1500 ? 5 : 4;
    return { show: true, size, width: 1, stroke: num <= 400 ? () => colour("--page") : fill, fill };
  }

  function seriesOf(spec) { // [[options, values]], the edges of bands first: a band lies behind all lines
    const areas = spec.series[0].kind === "area", sums = areas ? stacked(spec.series) : null;
    const order = spec.series.map((_, number) => (areas ? spec.series.length - 1 - number : number));
    const edges = [], lines = order.map((number) => {
      const one = spec.series[number], stroke = () => ofSeries(number);
      const options = { of: number, label: one.name, stroke, width: 2, dash: dashOf(number), spanGaps: one.kind === "line", points: { show: false } };
      options.value = (u, v, s, place) => (place == null ? "" : v == null ? "–" : narrow(areas ? one.y[place] : v) + (one.low && isKnown(one.low[place]) ? " (" + narrow(one.low[place]) + " to " + narrow(one.high[place]) + ")" : ""));
      if (areas) Object.assign(options, { fill: stroke, width: 0 });
      else if (one.kind === "bars") Object.assign(options, { fill: stroke, paths: uPlot.paths.bars({ size: [0.9, 60] }) });
      else if (one.kind === "stepped") Object.assign(options, { spanGaps: true, paths: uPlot.paths.stepped({ align: 1 }) });
      else if (one.kind === "points") Object.assign(options, { paths: () => null, dash: [], points: dots(one, stroke) });
      else if (!one.mixed && one.y.filter(isKnown).length <= 30) options.points = { show: true, size: 6, fill: stroke };
      const edge = { of: number, class: "edge", stroke: "transparent", width: 1, spanGaps: true, points: { show: false } };
      if (one.low) edges.push([edge, one.low], [{ ...edge }, one.high]);
      return [options, areas ? sums[number] : one.y];
    });
    return [...edges, ...lines];
  }

  function bandsOf(all) { // pairs of edges, filled with the colour of their line
    const faint = (number) => "color-mix(in srgb, " + ofSeries(number) + " 22%, transparent)";
    return all.flatMap(([options], place) => (options.class && place % 2 ? [{ series: [place + 1, place], fill: () => faint(options.of) }] : []));
  }

  // ---- axes

  function fitted(spec, low, high) { // the y axis: as much as the data need
    if (low == null) return [0, 1];
    if (["area", "bars"].includes(spec.series[0].kind)) return [0, high * 1.05 || 1];
    if (/%/.test(spec.y_label) && low >= 0 && high <= 100) return [0, high > 50 ? 105 : high * 1.06 || 1];
    if (spec.log_y) return low === high ? [low / 1.1, low * 1.1] : [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
    const pad = low === high ? Math.abs(low) * 0.05 || 1 : (high - low) * 0.06;
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  }

  function width(spec, low, high) { // the x axis
    if (spec.x[0] === spec.x[spec.x.length - 1]) low = high = spec.x[0]; // uPlot takes years around a lonely date
    if (low == null) return [0, 1];
    if (spec.log_x) return low === high ? [low / 2, low * 2] : [low * (low / high) ** 0.02, high * (high / low) ** 0.02];
    const dots = spec.series.some((one) => ["points", "bars", "stepped"].includes(one.kind));
    const least = spec.dates ? HOUR_S : 0, share = dots || low === high ? 0.04 : 0.01;
    const pad = Math.max((high - low) * share, (least - (high - low)) / 2, low === high ? (spec.dates ? 12 * HOUR_S : 1) : 0);
    return [low - pad, high + pad];
  }

  function nice(u, axis, low, high) { // ticks of a logarithmic axis that spans less than two powers of ten
    if (high > 8 * low) return [-1, 0, 1, 2].flatMap((power) => [1, 2, 5].map((digit) => +(digit * 10 ** (Math.floor(Math.log10(low)) + power)).toPrecision(1))).filter((one) => one >= low && one <= high);
    const rough = (high - low) / (u.width < 500 ? 3 : 6), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= 0.7 * rough);
    return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, number) => (Math.ceil(low / step) + number) * step);
  }

  function axisOf(spec, label, isLog, values) {
    const line = { stroke: () => colour("--line") };
    const axis = { label, labelSize: 24, font: "13px system-ui, sans-serif", labelFont: "13px system-ui, sans-serif", stroke: () => colour("--soft"), grid: { ...line, width: 0.5 }, ticks: line };
    const known = values.filter(isKnown), ends = known.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
    if (isLog && ends[1] < 100 * ends[0]) Object.assign(axis, { splits: nice, filter: (u, splits) => splits });
    else if (!isLog && known.every(Number.isInteger)) axis.incrs = WHOLE; // there is no run 1.5
    if (label === spec.x_label && spec.names) axis.values = (u, splits) => splits.map((one) => spec.names[one] ?? "");
    else if (isLog || !spec.dates) axis.values = (u, splits) => splits.map((one) => (one == null ? "" : one.toLocaleString("en", { maximumSignificantDigits: 6, notation: Math.abs(one) >= 1e6 ? "compact" : "standard" })));
    return axis;
  }

  function dateAxis(axis) { // UTC, as in the records
    const words = (seconds) => new Date(seconds * 1000).toISOString();
    const values = (u, splits, place, space, step) => splits.map((one) => (step >= 24 * HOUR_S ? words(one).slice(0, 10) : words(one).slice(5, 10) + "\n" + words(one).slice(11, 16)));
    return { ...axis, incrs: undefined, values, space: 90, size: 60 };
  }

  function marks(spec) { // lines behind the data: what happened there is said in the table of events
    return (u) => {
      const context = u.ctx;
      context.save();
      for (const mark of spec.marks || []) {
        const x = u.valToPos(mark.x, "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        context.strokeStyle = colour(mark.kind === "stall" ? "--mark" : "--line");
        context.lineWidth = mark.kind === "stall" ? 2 : 1;
        context.setLineDash(mark.kind === "validation" ? [4, 4] : []);
        context.beginPath();
        context.moveTo(x, u.bbox.top);
        context.lineTo(x, u.bbox.top + u.bbox.height);
        context.stroke();
      }
      context.restore();
    };
  }

  // ---- what a reader does

  function legend(plot, all) { // its names are buttons: click, Enter or Space hides and shows a series, its band with it
    plot.root.querySelectorAll(".u-series").forEach((row, number) => {
      const head = row.querySelector("th");
      if (number === 0 || all[number - 1][0].class) return;
      Object.assign(head, { tabIndex: 0, title: "click to hide or show" });
      head.setAttribute("role", "button");
      head.setAttribute("aria-pressed", "true");
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        plot.setSeries(number, { show: !plot.series[number].show });
      });
    });
  }

  const toggled = (all) => (u, number, options) => {
    if (number == null || options.show == null || all[number - 1][0].class) return;
    const head = u.root.querySelectorAll(".u-series")[number].querySelector("th");
    head.setAttribute("aria-pressed", String(options.show));
    all.forEach(([one], place) => one.class && one.of === all[number - 1][0].of && u.setSeries(place + 1, { show: options.show }));
  };

  function nearest(plot, spec, all) { // {one, place, top}: the labelled point under the cursor, or the line that it is on
    let best = NEAR_PX, found;
    for (const [number, [options, values]] of all.entries()) {
      const one = spec.series[options.of], isPoint = one.links || one.labels;
      if (options.class || !plot.series[number + 1].show || (!isPoint && spec.series.length < 2)) continue;
      for (const place of isPoint ? values.keys() : [plot.cursor.idxs[number + 1]]) {
        if (!isKnown(values[place])) continue;
        const top = plot.valToPos(values[place], "y"), aside = isPoint ? plot.valToPos(spec.x[place], "x") - plot.cursor.left : 0;
        const away = Math.hypot(aside, top - plot.cursor.top);
        if (away <= best) [best, found] = [away, { one, place, top }];
      }
    }
    return found;
  }

  function points(plot, spec, all) { // hover says which point or line it is, a click opens a point's link; gives both
    const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    plot.over.append(tip);
    const linkOf = (found) => found && found.one.links && found.one.links[found.place];
    const open = () => {
      const link = linkOf(nearest(plot, spec, all));
      if (link) location.href = link;
    };
    plot.over.addEventListener("click", open);
    const hover = () => {
      const found = plot.cursor.idx == null ? null : nearest(plot, spec, all);
      const label = found && (found.one.labels ? found.one.labels[found.place] : found.one.name + ": " + narrow(found.one.y[found.place]));
      tip.hidden = !label;
      plot.over.classList.toggle("clickable", Boolean(linkOf(found)));
      if (!label) return;
      tip.textContent = label;
      const left = plot.valToPos(spec.x[found.place], "x"), right = plot.over.clientWidth - left;
      Object.assign(tip.style, { left: left > right ? "" : left + 10 + "px", right: left > right ? right + 10 + "px" : "", top: Math.max(0, found.top - 30) + "px" });
    };
    return { open, hover };
  }

  function keys(place, plot, spec, open) {
    place.onkeydown = (event) => {
      if (event.key === "Enter" && event.target === place) open();
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = Math.max(0, Math.min(spec.x.length - 1, (plot.cursor.idx == null ? -1 : plot.cursor.idx) + by));
      const column = plot.data.find((values, number) => number && plot.series[number].show && !plot.series[number].class && isKnown(values[next]));
      plot.setCursor({ left: plot.valToPos(spec.x[next], "x"), top: column ? plot.valToPos(column[next], "y") : 10 });
    };
  }

  function nearestKnown(u, number, place) { // arms have values at different x: the legend shows each one's nearest
    const values = u.data[number];
    for (let away = 0; away < values.length; away++) {
      if (isKnown(values[place - away])) return place - away;
      if (isKnown(values[place + away])) return place + away;
    }
    return place;
  }

  function draw(place, given) {
    const spec = given.arms ? joinedArms(given) : given;
    if (drawn.has(place)) drawn.get(place).destroy();
    drawn.delete(place);
    if (!spec.x.length) return null;
    const all = seriesOf(spec), values = all.flatMap(([, column]) => column);
    const xAxis = axisOf(spec, spec.x_label, spec.log_x, spec.x);
    let hover = () => {};
    const plot = new uPlot({
      width: place.clientWidth || 600,
      height: spec.height || (place.clientWidth < 500 ? 240 : 270),
      scales: {
        x: { time: Boolean(spec.dates), distr: spec.log_x ? 3 : 1, range: (u, low, high) => width(spec, low, high) },
        y: { distr: spec.log_y ? 3 : 1, range: (u, low, high) => fitted(spec, low, high) },
      },
      axes: [spec.dates ? dateAxis(xAxis) : { ...xAxis, size: 36, space: spec.names ? 80 : 64 }, { ...axisOf(spec, spec.y_label, spec.log_y, values), size: 64 }],
      series: [{ label: spec.x_label, value: (u, v) => (v == null ? "–" : spec.names ? spec.names[v] : spec.dates ? new Date(v * 1000).toISOString().slice(0, 19).replace("T", " ") : narrow(v)) }, ...all.map(([options]) => options)],
      bands: bandsOf(all),
      legend: { markers: { width: 0, fill: (u, number) => (number ? "var(--series-" + (all[number - 1][0].of % 8) + ")" : null) } },
      hooks: { drawClear: [marks(spec)], setSeries: [toggled(all)], setCursor: [() => hover()] },
      cursor: { ...(spec.sync ? { sync: { key: spec.sync, setSeries: false, scales: ["x", null] } } : {}), ...(given.arms ? { dataIdx: (u, number, idx) => (number ? nearestKnown(u, number, idx) : idx) } : {}) },
    }, [spec.x, ...all.map(([, column]) => column)], place);
    drawn.set(place, plot);
    legend(plot, all);
    const acts = points(plot, spec, all);
    hover = acts.hover;
    keys(place, plot, spec, acts.open);
    return plot;
  }

  // ---- the page

  const block = document.getElementById("charts");
  for (const spec of block ? JSON.parse(block.textContent) : []) {
    const place = document.querySelector('[data-chart="' + CSS.escape(spec.id) + '"]');
    if (place) draw(place, spec);
  }
  globalThis.charts = { draw, narrow, colourOf: ofSeries };
  const redraw = () => drawn.forEach((plot) => plot.redraw(false, true));
  addEventListener("resize", () => drawn.forEach((plot, place) => plot.setSize({ width: place.clientWidth, height: plot.height })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const root = document.documentElement, as = (theme) => { theme ? (root.dataset.theme = theme) : delete root.dataset.theme; redraw(); };
  let onScreen; // its theme: paper is light
  addEventListener("beforeprint", () => { onScreen = root.dataset.theme; as("light"); });
  addEventListener("afterprint", () => as(onScreen));
  const button = document.getElementById("theme");
  if (button) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      as(dark ? "light" : "dark");
    });
  }
})();
