// Draws the curves of the page, and answers its controls. uPlot is there already.
"use strict";
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const shown = runs.map(() => true);
  const drawn = [];
  let axis = "steps";
  // What all charts show of the axis; null: everything.
  let range = null;
  let spreading = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dashes = [[], [8, 4], [2, 4]];
  const number = (value) => (value == null ? "—" : String(Number(value.toPrecision(5))));
  // Steps are whole, however many; seconds have milliseconds.
  const position = (value) => String(Math.round(value * 1000) / 1000);

  // Labels of an axis: as many decimals as tell its marks apart.
  function marks(plot, splits, axis, space, step) {
    const most = Math.max(...splits.map((value) => Math.abs(value ?? 0)));
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    if (most >= 1e7 || decimals > 6) {
      const digits = Math.max(0, Math.floor(Math.log10(most) + 1e-9) + decimals);
      return splits.map((value) => value?.toExponential(Math.min(digits, 6)));
    }
    const format = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
    return splits.map((value) => value?.toLocaleString("en", format));
  }

  // Seconds are shown in the unit that the longest run makes readable.
  const longest = charts.flatMap((c) => c.curves.map((r) => r.seconds.at(-1) ?? 0))
    .reduce((a, b) => Math.max(a, b), 0);
  const [unit, divisor] = longest > 10800 ? ["h", 3600] : longest > 300 ? ["min", 60] : ["s", 1];
  const axisLabel = () => (axis === "steps" ? "step" : `time (${unit})`);

  // One table over the places of all runs: undefined where a run has no point, null where a gap is.
  function tableOf(chart) {
    const tables = chart.curves.map((curve) => [
      axis === "steps" ? curve.steps : curve.seconds.map((s) => s / divisor),
      curve.values,
    ]).map(([x, y]) => {
      // Points of one place, as steps within a millisecond have, become the last of them.
      const keep = x.map((each, i) => each !== x[i + 1]);
      return [x.filter((_, i) => keep[i]), y.filter((_, i) => keep[i])];
    });
    return uPlot.join(tables);
  }

  function options(chart, width) {
    const grid = { stroke: colour("--grid"), width: 1 };
    const axisOf = (label, more) => ({
      stroke: colour("--soft"), grid, ticks: grid, label, labelSize: 22, labelFont: "12px system-ui",
      font: "12px system-ui", values: marks, ...more,
    });
    const lines = runs.map((name, i) => ({
      label: name, show: shown[i], stroke: colour(`--run${i % 8}`), width: 1.4,
      dash: dashes[Math.floor(i / 8) % 3], spanGaps: false,
    }));
    return {
      width, height: 250, legend: { show: false },
      cursor: { sync: { key: "runs", setSeries: false }, drag: { x: true, y: false, setScale: true },
                points: { size: 7 } },
      scales: { x: { time: false } },
      axes: [axisOf(axisLabel(), { size: 32 }), axisOf(chart.unit || chart.title, { size: 68 })],
      series: [{ label: axisLabel() }, ...lines],
      hooks: { setScale: [(plot, key) => key === "x" && spread(plot)], setCursor: [say],
               setSeries: [say] },
    };
  }

  // A zoom into one chart is one into all.
  function spread(from) {
    if (spreading) return;
    const { min, max } = from.scales.x;
    const x = from.data[0];
    if (min == null || !x.length) return;
    range = min <= x[0] && max >= x.at(-1) ? null : [min, max];
    apply(from);
  }

  function apply(but) {
    spreading = true;
    for (const { plot } of drawn) {
      if (plot === but) continue;
      const x = plot.data[0];
      if (x.length) plot.setScale("x", range ? { min: range[0], max: range[1] } : whole(x));
    }
    spreading = false;
    // An end that is that of the runs is left empty.
    const [first, last] = ends();
    byId("from").value = range && range[0] > first ? position(range[0]) : "";
    byId("to").value = range && range[1] < last ? position(range[1]) : "";
  }

  function ends() {
    const x = drawn.flatMap(({ plot }) => (plot.data[0].length ? [plot.data[0][0], plot.data[0].at(-1)] : []));
    return [Math.min(...x), Math.max(...x)];
  }

  const whole = (x) => (x.length > 1 ? { min: x[0], max: x.at(-1) } : { min: x[0] - 1, max: x[0] + 1 });

  function zoomTo(next) {
    range = next;
    apply(null);
  }

  // The values at the cursor, below its chart: of each run that of its nearest point.
  function say(plot) {
    const place = plot.cursor.idx;
    const said = drawn.find((each) => each.plot === plot)?.readout;
    if (!said) return;
    said.replaceChildren();
    if (place == null || plot.data[0][place] == null) return;
    const at = document.createElement("span");
    at.textContent = `${axisLabel()} ${position(plot.data[0][place])}`;
    said.append(at);
    runs.forEach((name, i) => {
      if (!shown[i]) return;
      const item = document.createElement("span");
      const value = document.createElement("b");
      value.textContent = number(nearest(plot.data[i + 1], place));
      item.append(swatch(i), `${name} `, value);
      said.append(item);
    });
  }

  function nearest(values, place) {
    for (let away = 0; away < values.length; away++) {
      for (const i of [place - away, place + away]) {
        if (values[i] !== undefined) return values[i];
      }
      if (place - away < 0 && place + away >= values.length) break;
    }
    return null;
  }

  const swatch = (i) => document.querySelector(`.bar [data-run="${i}"] + svg`).cloneNode(true);

  function press(event, plot) {
    const x = plot.data[0];
    if (!x.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = plot.scales.x;
    const place = plot.cursor.idx ?? x.findIndex((each) => each >= min);
    const middle = plot.cursor.idx == null ? (min + max) / 2 : x[place];
    const zoom = (factor) => zoomTo([middle - (middle - min) * factor, middle + (max - middle) * factor]);
    const move = (by) => {
      const next = Math.min(x.length - 1, Math.max(0, place + by));
      plot.setCursor({ left: plot.valToPos(x[next], "x"), top: plot.bbox.height / devicePixelRatio / 2 });
    };
    const actions = {
      ArrowLeft: () => move(-1), ArrowRight: () => move(plot.cursor.idx == null ? 0 : 1),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      0: () => zoomTo(null), Escape: () => zoomTo(null),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  }

  function build() {
    const place = byId("charts");
    drawn.splice(0).forEach(({ plot }) => plot.destroy());
    place.replaceChildren();
    if (!charts.length) place.textContent = "No steps have been written yet.";
    for (const chart of charts) {
      const card = document.createElement("div");
      card.className = "chart";
      const title = document.createElement("h3");
      title.textContent = chart.title;
      if (chart.unit) {
        const small = document.createElement("small");
        small.textContent = chart.unit;
        title.append(" ", small);
      }
      const box = document.createElement("div");
      box.className = "plot";
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", `${chart.title}${chart.unit ? `, ${chart.unit}` : ""}, a chart`);
      const readout = document.createElement("div");
      readout.className = "readout";
      readout.setAttribute("aria-live", "polite");
      card.append(title, box, readout);
      place.append(card);
      spreading = true;
      const plot = new uPlot(options(chart, Math.max(box.clientWidth, 200)), tableOf(chart), box);
      spreading = false;
      drawn.push({ plot, box, readout });
      box.addEventListener("keydown", (event) => press(event, plot));
      sizes.observe(box);
    }
    apply(null);
  }

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = drawn.find(({ box }) => box === target)?.plot;
      if (plot && target.clientWidth && plot.width !== target.clientWidth) {
        plot.setSize({ width: target.clientWidth, height: plot.height });
      }
    }
  });

  function show(run, isShown) {
    shown[run] = isShown;
    document.querySelector(`[data-run="${run}"]`).checked = isShown;
    document.querySelectorAll(`[data-of="${run}"]`).forEach((each) => { each.hidden = !isShown; });
    for (const { plot } of drawn) plot.setSeries(run + 1, { show: isShown });
  }

  byId("bar").addEventListener("change", ({ target }) => {
    if (target.dataset.run) show(Number(target.dataset.run), target.checked);
    if (target.name === "axis") {
      axis = target.value;
      range = null;
      build();
    }
    if (target.id === "from" || target.id === "to") {
      const given = [byId("from"), byId("to")].map((each) => each.value);
      const [from, to] = ends().map((end, i) => (given[i] === "" ? end : Number(given[i])));
      if (from < to) zoomTo([from, to]);
    }
  });
  byId("all").addEventListener("click", () => runs.forEach((_, i) => show(i, true)));
  byId("none").addEventListener("click", () => runs.forEach((_, i) => show(i, false)));
  byId("reset").addEventListener("click", () => zoomTo(null));
  const alike = byId("alike");
  const shorten = () => byId("config").classList.toggle("short", !alike.checked);
  alike.addEventListener("change", shorten);
  shorten();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  addEventListener("beforeprint", build);
  build();
})();
