// Draws the chart specs of the page's JSON block "charts" (bench/web/chart.py) with uPlot.  Arrow keys move the cursor.
"use strict";
(function () {
  const block = document.getElementById("charts");
  const specs = block ? JSON.parse(block.textContent) : [];
  const drawn = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ofSeries = (number) => colour("--series-" + (number % 8));
  const narrow = (value) => (value == null ? "–" : Math.abs(value) >= 1e5 ? value.toExponential(3) : String(+value.toPrecision(5)));

  function stacked(series) { // areas are drawn from the highest sum down, so that each covers what is below it
    const sums = series[0].y.map(() => 0);
    return series.map((one) => one.y.map((value, place) => (value == null ? null : (sums[place] += value))));
  }

  function columns(spec) {
    if (spec.series[0].kind !== "area") return spec.series.map((one) => one.y);
    return stacked(spec.series).reverse();
  }

  function seriesOptions(spec) {
    const areas = spec.series[0].kind === "area";
    const order = areas ? spec.series.map((_, number) => spec.series.length - 1 - number) : spec.series.map((_, number) => number);
    return order.map((number) => {
      const one = spec.series[number];
      const options = { label: one.name, stroke: () => ofSeries(number), width: 1.5, spanGaps: one.kind === "line" };
      options.value = areas ? (u, v, s, place) => (place == null ? "–" : narrow(one.y[place])) : (u, v) => narrow(v);
      if (areas) Object.assign(options, { fill: () => ofSeries(number), width: 0, points: { show: false } });
      else if (one.kind === "bars") Object.assign(options, { fill: () => ofSeries(number), paths: uPlot.paths.bars({ size: [0.9, 60] }), points: { show: false } });
      else if (one.kind === "points") Object.assign(options, { paths: () => null, points: { show: true, size: spec.x.length > 1500 ? 3 : 5, fill: () => ofSeries(number) } });
      else options.points = { show: false };
      return options;
    });
  }

  function marks(spec) { // lines behind the data: what happened there is said in the table of events
    return (u) => {
      const context = u.ctx;
      context.save();
      for (const mark of spec.marks) {
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

  const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  function draw(place, spec) {
    const axis = (label) => ({ label, stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 0.5 }, ticks: { stroke: () => colour("--line") } });
    const lonely = spec.x.length === 1 && (spec.dates ? 86400 : 1); // one point has no range of its own: a day, or one, around it
    const whole = !spec.dates && spec.x.every(Number.isInteger); // there is no run 1.5
    const narrowScreen = place.clientWidth < 500;
    const options = {
      width: place.clientWidth || 600,
      height: narrowScreen ? 220 : 260,
      scales: { x: Object.assign({ time: Boolean(spec.dates) }, lonely ? { range: [spec.x[0] - lonely, spec.x[0] + lonely] } : {}), y: spec.series[0].kind === "area" || spec.series[0].kind === "bars" ? { range: (u, low, high) => [0, high * 1.05 || 1] } : {} },
      axes: [Object.assign(axis(spec.x_label), whole ? { incrs: WHOLE } : {}), Object.assign(axis(spec.y_label), { size: 64 })],
      series: [spec.dates ? { label: spec.x_label } : { label: spec.x_label, value: (u, v) => narrow(v) }, ...seriesOptions(spec)],
      hooks: { drawClear: [marks(spec)] },
      cursor: spec.sync ? { sync: { key: spec.sync, setSeries: false, scales: ["x", null] } } : {},
    };
    const plot = new uPlot(options, [spec.x, ...columns(spec)], place);
    drawn.push([place, plot]);
    place.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (!by) return;
      event.preventDefault();
      const at = Math.max(0, Math.min(spec.x.length - 1, (plot.cursor.idx == null ? -1 : plot.cursor.idx) + by));
      plot.setCursor({ left: plot.valToPos(spec.x[at], "x"), top: 10 });
    });
  }

  for (const spec of specs) {
    const place = document.querySelector('[data-chart="' + CSS.escape(spec.id) + '"]');
    if (place && spec.x.length) draw(place, spec);
  }
  const redraw = () => drawn.forEach(([, plot]) => plot.redraw(false, true));
  addEventListener("resize", () => drawn.forEach(([place, plot]) => plot.setSize({ width: place.clientWidth, height: plot.height })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const button = document.getElementById("theme");
  if (button) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      redraw();
    });
  }
})();
