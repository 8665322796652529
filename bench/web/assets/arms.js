// A spec of arms (bench/web/chart.py, of_arms) -> a spec of lines: the mean of each arm's runs, with the edges of its band.
"use strict";
(function () {
  const MAX_GRID = 1000; // points of an arm's mean
  const isKnown = (value) => value != null;

  function along(run, grid) { // the run's values on the grid, linear between its points; after its end the last one
    let high = 0;
    return grid.map((x) => {
      if (x >= run.x[run.x.length - 1]) return run.y[run.y.length - 1];
      while (run.x[high] < x && high < run.x.length - 1) high += 1;
      if (run.x[high] === x) return run.y[high];
      const share = (x - run.x[high - 1]) / (run.x[high] - run.x[high - 1]);
      return run.y[high - 1] + share * (run.y[high] - run.y[high - 1]);
    });
  }

  function gridOf(runs) { // the x of all runs, from where every one of them has values to the end of the longest
    const low = Math.max(...runs.map((run) => run.x[0])), high = Math.max(...runs.map((run) => run.x[run.x.length - 1]));
    const all = [...new Set(runs.flatMap((run) => run.x))].filter((x) => x >= low && x <= high).sort((a, b) => a - b);
    if (all.length <= MAX_GRID) return all;
    return [...Array(MAX_GRID).keys()].map((number) => low + ((high - low) * number) / (MAX_GRID - 1));
  }

  function ofArm(arm, band) { // [x, mean, low, high]; a single run is itself
    const runs = arm.runs.map((run) => {
      const places = run.x.map((_, place) => place).filter((place) => isKnown(run.x[place]) && isKnown(run.y[place]));
      return { x: places.map((place) => run.x[place]), y: places.map((place) => run.y[place]) };
    }).filter((run) => run.x.length);
    if (runs.length < 2) return runs.length ? [runs[0].x, runs[0].y] : [[], []];
    const x = gridOf(runs), columns = runs.map((run) => along(run, x)), values = x.map((_, place) => columns.map((column) => column[place]));
    const means = values.map((some) => some.reduce((sum, one) => sum + one, 0) / some.length);
    if (band === "none") return [x, means];
    if (band !== "sd") return [x, means, values.map((some) => Math.min(...some)), values.map((some) => Math.max(...some))];
    const sds = values.map((some, place) => Math.sqrt(some.reduce((sum, one) => sum + (one - means[place]) ** 2, 0) / (some.length - 1)));
    return [x, means, means.map((one, place) => one - sds[place]), means.map((one, place) => one + sds[place])];
  }

  globalThis.joinedArms = function (spec) { // a spec of arms -> one of lines, on the x of all of them
    const tables = spec.arms.map((arm) => ofArm(arm, spec.band));
    const [x, ...columns] = tables.some(([of]) => of.length) ? uPlot.join(tables) : [[]];
    const series = [];
    for (const [number, table] of tables.entries()) {
      const [y, low, high] = columns.splice(0, table.length - 1);
      if (low && spec.log_y) low.forEach((value, place) => value <= 0 && (low[place] = null)); // a logarithm has no place for it
      const mixed = spec.arms[number].runs.some((run) => run.x.length !== table[0].length); // its x are no run's own
      series.push({ name: spec.arms[number].name, kind: "line", y, low, high, mixed });
    }
    return { ...spec, x, series };
  };
})();
