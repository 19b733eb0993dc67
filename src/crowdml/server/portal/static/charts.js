/**
 * Interactive charts over the server's pictures, drawn with plotly once they come into view. They follow the page's
 * colours and language. Plotly's rules go into a sheet of ours (plotly.css), so the page needs no inline style.
 * @typedef {{ x: (string | number)[], y: number[], low?: number[], high?: number[] }} Series
 * @typedef {{ index: number } & Record<string, Series>} Figures
 */

const DAY = 24 * 3600 * 1000; // milliseconds
const DATES = [
  { dtickrange: [null, 59_000], value: "%H:%M:%S\n%Y-%m-%d" },
  { dtickrange: [60_000, DAY - 1], value: "%H:%M\n%Y-%m-%d" },
  { dtickrange: [DAY, null], value: "%Y-%m-%d" },
]; // numbers alone: they read the same in every language
const SHEET = "plotly.js-style-global"; // the id under which plotly looks for its sheet

/** @param {HTMLElement} place */
export function chartsOf(place) {
  /** @type {any} */
  let plotly = null;
  let shown = -1;
  let wanted = 0;
  let busy = false;

  async function draw() {
    if (!plotly || busy) return;
    busy = true;
    try {
      const answer = await fetch(place.dataset.figures ?? "");
      if (!answer.ok) return;
      /** @type {Figures} */
      const figures = await answer.json();
      shown = figures.index;
      for (const figure of place.querySelectorAll("[data-chart]")) {
        await drawOne(plotly, /** @type {HTMLElement} */ (figure), figures, place.dataset);
      }
      place.dataset.drawn = String(shown);
    } finally {
      busy = false;
    }
  }

  const seen = new IntersectionObserver(async (entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    plotly = await loaded(place.dataset);
    await draw();
  }, { rootMargin: "200px" });
  seen.observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  return {
    /** Show the figures of this moment, unless they are shown. @param {string | number | undefined} index */
    refresh(index) {
      wanted = Number(index ?? wanted);
      if (wanted > shown) draw();
    },
  };
}

/** Load the sheet and then the script, both from this server. @param {DOMStringMap} from */
async function loaded(from) {
  await new Promise((done, failed) => {
    const sheet = Object.assign(document.createElement("link"), { id: SHEET, rel: "stylesheet", href: from.sheet, onload: done, onerror: failed });
    document.head.append(sheet);
  });
  for (const id of (from.guards ?? "").split(" ").filter(Boolean)) {
    document.head.append(Object.assign(document.createElement("template"), { id })); // so that plotly adds no style of this id
  }
  await new Promise((done, failed) => {
    document.head.append(Object.assign(document.createElement("script"), { src: from.plotly, onload: done, onerror: failed }));
  });
  return /** @type {any} */ (globalThis).Plotly;
}

/** @param {any} plotly @param {HTMLElement} figure @param {Figures} figures @param {DOMStringMap} words */
async function drawOne(plotly, figure, figures, words) {
  const name = figure.dataset.chart ?? "";
  const series = figures[name];
  const enough = ["error", "labels", "accuracy", "distance"].includes(name) ? 1 : 2;
  if (!series || series.x.length < enough) return;
  if (name === "labels" && series.x.every((_, i) => (series.low?.[i] ?? 0) <= 0 && (series.high?.[i] ?? 1) >= 1)) return;
  let plot = /** @type {HTMLElement | null} */ (figure.querySelector(".plot"));
  if (!plot) {
    figure.querySelector(".waits")?.remove();
    plot = Object.assign(document.createElement("div"), { className: "plot" });
    figure.append(plot);
  }
  const picture = plot.querySelector("picture");
  if (picture) {
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", picture.querySelector("img")?.alt ?? "");
    picture.remove();
  }
  const look = colours();
  const tall = name === "labels" ? Math.max(140, 36 * series.x.length + 50) : 260;
  const layout = {
    height: tall,
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: look.font, size: 13, color: look.quiet },
    separators: words.language === "de" ? ",." : ".,",
    showlegend: false,
    hovermode: name === "labels" ? "closest" : "x",
    hoverlabel: { bgcolor: look.card, bordercolor: look.line, font: { family: look.font, color: look.ink } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { gridcolor: look.line, linecolor: look.line, zeroline: false, automargin: true, fixedrange: name === "labels" },
    yaxis: { gridcolor: look.line, zeroline: false, automargin: true, fixedrange: true, ticklabelstandoff: 6 },
  };
  await plotly.react(plot, traces(name, series, look, words, layout), layout, { displayModeBar: false, responsive: true });
}

/** @param {string} name @param {Series} series @param {Record<string, string>} look @param {DOMStringMap} words @param {any} layout */
function traces(name, series, look, words, layout) {
  const line = { color: look.accent, width: 2 };
  if (name === "labels") {
    Object.assign(layout.xaxis, { tickformat: ".0%" });
    Object.assign(layout.yaxis, { autorange: "reversed", type: "category" });
    const low = series.low ?? [], high = series.high ?? [];
    return [{
      type: "bar", orientation: "h", x: series.y, y: series.x, marker: { color: look.accent, opacity: 0.4 }, width: 0.6,
      error_x: { type: "data", symmetric: false, array: high.map((h, i) => h - series.y[i]), arrayminus: low.map((l, i) => series.y[i] - l), color: look.accent, thickness: 1.5, width: 4 },
      customdata: low.map((l, i) => [l, high[i]]),
      hovertemplate: `%{y}: %{x:.1%}<br>${words.interval}: %{customdata[0]:.1%} … %{customdata[1]:.1%}<extra></extra>`,
    }];
  }
  if (name === "error") {
    const low = series.low ?? [], high = series.high ?? [];
    Object.assign(layout.xaxis, { title: { text: words.axisCheckIns, font: { size: 13 }, standoff: 8 }, tickformat: ",d" });
    Object.assign(layout.yaxis, { tickformat: ".0%", range: [0, Math.min(1, Math.max(0.1, ...high))] });
    return [
      { x: series.x, y: low, mode: "lines", line: { width: 0 }, hoverinfo: "skip" },
      { x: series.x, y: high, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: look.band, hoverinfo: "skip" },
      {
        x: series.x, y: series.y, mode: series.x.length < 3 ? "lines+markers" : "lines", line, marker: { color: look.accent },
        customdata: low.map((l, i) => [l, high[i]]),
        hovertemplate: `%{y:.1%}<br>${words.interval}: %{customdata[0]:.1%} … %{customdata[1]:.1%}<extra></extra>`,
      },
    ];
  }
  if (name === "accuracy" || name === "distance") {
    const low = series.low ?? [], high = series.high ?? [];
    const blurred = low.some((l, i) => l < high[i]);
    const form = name === "accuracy" ? ".1%" : ".4~g";
    Object.assign(layout.xaxis, { title: { text: words.axisVersions, font: { size: 13 }, standoff: 8 }, tickformat: ",d", ...(Number(series.x.at(-1)) - Number(series.x[0]) < 6 && { dtick: 1 }) });
    Object.assign(layout.yaxis, name === "accuracy" ? { tickformat: ".0%", range: [0, 1] } : { range: [Math.min(0, ...low), Math.max(...high) * 1.08 || 1] });
    const range = blurred ? `<br>${words.interval}: %{customdata[0]:${form}} … %{customdata[1]:${form}}` : "";
    return [
      ...(blurred ? [
        { x: series.x, y: low, mode: "lines", line: { width: 0 }, hoverinfo: "skip" },
        { x: series.x, y: high, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: look.band, hoverinfo: "skip" },
      ] : []),
      {
        x: series.x, y: series.y, mode: series.x.length <= 60 ? "lines+markers" : "lines", line, marker: { color: look.accent, size: 6 },
        customdata: low.map((l, i) => [l, high[i]]), hovertemplate: `%{y:${form}}${range}<extra></extra>`,
      },
    ];
  }
  Object.assign(layout.xaxis, { tickformatstops: DATES, hoverformat: "%Y-%m-%d %H:%M:%S", nticks: 4 });
  const most = Math.max(1, ...series.y);
  Object.assign(layout.yaxis, { tickformat: ",d", range: [0, most * 1.08], nticks: 6, ...(most < 6 && { dtick: 1 }) }); // no half devices
  return [{ x: series.x.map(local), y: series.y, mode: "lines", line: { ...line, shape: "hv" }, fill: "tozeroy", fillcolor: look.band, hovertemplate: "%{y:,d}<extra></extra>" }];
}

/** A time on the reader's own clock: plotly shows a time as it is written. @param {string | number} at */
function local(at) {
  const when = new Date(at);
  return new Date(when.getTime() - 60_000 * when.getTimezoneOffset()).toISOString().slice(0, -1);
}

/** The page's own colours, so that charts are dark where the page is. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const [ink, quiet, line, accent, card] = ["ink", "quiet", "line", "accent", "card"].map((name) => style.getPropertyValue(`--${name}`).trim());
  return { ink, quiet, line, accent, card, band: `${accent}2e`, font: getComputedStyle(document.body).fontFamily };
}
