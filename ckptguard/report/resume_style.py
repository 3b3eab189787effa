"""How the page of ``verify-resume`` looks, and what it does where scripts run: it is whole without them."""

from __future__ import annotations

GROUP_COLOURS = {  # white text on each has a contrast of 4.5 or more, each has 3 or more against both grounds of the page
    "counter": "#5a6a79", "rng at begin": "#8059bb", "batch": "#525dbd", "loss": "#b94642", "gradient": "#a84500",
    "metric": "#b64466", "scaler": "#a43d74", "master": "#0f74c5", "optimizer": "#0f7483", "parameter": "#118659",
    "buffer": "#42790d", "unsaved buffer": "#70790e", "extra state": "#7f6500", "param group": "#9c640d",
    "scheduler": "#7f634b", "rng": "#9c4ea1", "other": "#686868",
}  # fmt: skip

STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --raised: #f6f7f9; --ink: #1c2127; --quiet: #57606a; --rule: #e1e5ea; --edge: #c9d0d8;
  --good: #1a7038; --bad: #b3261e; --warn: #8a5600; --link: #0b5cad; --same: #e6eaee;
  --first: #c3ccd8; --second: #7448c8; --third: #0a7d76; --fourth: #cf4a0c; --fifth: #9a6b00;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #101318; --raised: #181c23; --ink: #e4e7eb; --quiet: #9ba5b1; --rule: #272d36; --edge: #3a424d;
  --good: #56c97a; --bad: #ff8f85; --warn: #e6b450; --link: #7ab8ff; --same: #242a32;
  --first: #4d5968; --second: #b79cff; --third: #4fd0c3; --fourth: #ff9d66; --fifth: #e0b54a; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 1rem; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 var(--sans); }
main, header, footer { max-width: 66rem; margin: 0 auto; padding: 0 1.5rem; }
h1, h2, h3, h4, p, ul, ol, dl, dd, figure { margin: 0; padding: 0; }
a { color: var(--link); }
code, .mono { font-family: var(--mono); font-size: .875em; overflow-wrap: anywhere; }
.note { color: var(--quiet); font-size: .9rem; }
header { padding-top: 2.5rem; }
.verdict { border-left: 5px solid var(--tone); padding: .1rem 0 .1rem 1.25rem; }
.verdict h1 { font-size: 2rem; line-height: 1.2; font-weight: 650; letter-spacing: -.015em; color: var(--tone); }
.verdict .kicker { color: var(--quiet); font-size: .85rem; }
.verdict .sentence { font-size: 1.15rem; max-width: 46rem; margin-top: .4rem; overflow-wrap: anywhere; }
.good { --tone: var(--good); } .bad { --tone: var(--bad); } .warn { --tone: var(--warn); }
.numbers-strip { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin-top: 1.75rem; }
.numbers-strip dt { color: var(--quiet); font-size: .8rem; }
.numbers-strip dd { font-weight: 600; font-variant-numeric: tabular-nums; }
nav { margin-top: 1.5rem; padding: .6rem 0; border: solid var(--rule); border-width: 1px 0; }
nav ul { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; list-style: none; font-size: .875rem; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
section { margin-top: 3rem; }
h2 { font-size: 1.3rem; font-weight: 650; letter-spacing: -.01em; margin-bottom: .9rem; }
h3 { font-size: 1rem; font-weight: 650; overflow-wrap: anywhere; }
h4 { font-size: .85rem; font-weight: 500; color: var(--quiet); margin-top: 1.1rem; }
footer { margin-top: 4rem; padding-bottom: 2.5rem; color: var(--quiet); font-size: .85rem; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }

.pairs { display: grid; grid-template-columns: max-content 1fr; gap: .45rem 1.5rem; }
.pairs dt { color: var(--quiet); } .pairs dd { min-width: 0; overflow-wrap: anywhere; }
.pairs .part { grid-column: 1 / -1; font-weight: 600; margin-top: .6rem; color: var(--ink); }
.tags { display: flex; flex-wrap: wrap; gap: .35rem .9rem; list-style: none; }
.tags li { white-space: nowrap; } .tags b { font-weight: 600; font-variant-numeric: tabular-nums; }
.cards { display: grid; gap: .9rem; list-style: none; }
.card { background: var(--raised); border-radius: 8px; padding: 1rem 1.25rem; min-width: 0; }
.card h3 { margin-bottom: .25rem; } .card p + p { margin-top: .35rem; }
.badge { display: inline-block; font: 600 .75rem/1.5 var(--sans); border: 1px solid currentColor; border-radius: 4px;
  padding: 0 .45em; margin-right: .6em; color: var(--tone, var(--quiet)); vertical-align: .08em; }
.chain { padding-left: 1.6rem; max-width: 50rem; } .chain li { padding-left: .4rem; overflow-wrap: anywhere; }
.chain li + li { margin-top: .45rem; } .chain li::marker { color: var(--quiet); font-variant-numeric: tabular-nums; }
pre { font: .8rem/1.55 var(--mono); background: var(--raised); border-radius: 8px; padding: .9rem 1.1rem; margin: .6rem 0 0;
  overflow-x: auto; tab-size: 4; }
.card pre { background: var(--ground); }

.folded { margin-top: 1.5rem; } .folded .chart { margin-top: 1.5rem; }
.chart + .chart { margin-top: 2.25rem; }
figcaption { margin-bottom: .7rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.25rem; list-style: none; font-size: .85rem; margin-top: .3rem; }
.legend li { display: flex; align-items: center; gap: .5em; }
.plot { display: grid; grid-template-columns: 4.25rem minmax(0, 1fr); column-gap: .6rem; }
.plot .steps { grid-column: 2; } .area { position: relative; min-width: 0; }
.plot svg { display: block; width: 100%; overflow: visible; }
.plot text { font: 12px var(--sans); fill: var(--quiet); font-variant-numeric: tabular-nums; }
.plot .axis { font-size: 12px; line-height: 18px; color: var(--quiet); text-align: right; }
.plot .values text { text-anchor: end; } .map .steps text { text-anchor: middle; }
.lines path, .legend path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.lines { cursor: crosshair; }
.lines .rule { stroke: var(--rule); stroke-width: 1; }
.save-mark { stroke: var(--quiet); stroke-width: 1.25; stroke-dasharray: 2 4; vector-effect: non-scaling-stroke; }
.first { stroke: var(--first); } .second { stroke: var(--second); } .third { stroke: var(--third); }
.fourth { stroke: var(--fourth); } .fifth { stroke: var(--fifth); }
.arm { stroke-width: 1.75; } .arm.first { stroke-width: 7; } .arm.third, .arm.fourth { stroke-dasharray: 7 5; }
.dots { stroke-width: 6; } .dots.crowd { stroke-width: 3; }
.same.second, .same.third, .same.fourth, .same.fifth { stroke-width: 3.5; opacity: .55; }
.note + .cards, .note + .chain, h4 + .tags { margin-top: .5rem; }
.plot + .note { margin-top: .4rem; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--quiet); pointer-events: none; }
.tip { position: absolute; top: .25rem; z-index: 2; pointer-events: none; background: var(--ground);
    border: 1px solid var(--edge);
  border-radius: 6px; padding: .35rem .6rem; font-size: .8rem; white-space: nowrap; box-shadow: 0 2px 10px #0002; }
.tip b { display: block; } .tip span { font-family: var(--mono); font-size: .95em; }

.map.few { max-width: 16rem; } .map.some { max-width: 36rem; }
.cell { stroke: var(--ground); stroke-width: 1; } .cell:hover { stroke: var(--ink); stroke-width: 1.5; }
.ground, .cell.same { fill: var(--same); } .swatch.same { background: var(--same); border: 1px solid var(--edge); }
.plot .code { font: 600 10.5px var(--sans); fill: #fff; text-anchor: middle; pointer-events: none; }
.swatch { display: inline-grid; place-items: center; width: 1.6rem; height: 1.15rem; border-radius: 3px; color: #fff;
  font: 600 10.5px var(--sans); }
.readout { margin-top: .4rem; font-variant-numeric: tabular-nums; }

.scroll { overflow-x: auto; max-height: 32rem; overflow-y: auto; margin-top: .6rem; border: 1px solid var(--rule);
    border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .45rem .9rem; border-bottom: 1px solid var(--rule); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--raised); color: var(--quiet); font-weight: 500; z-index: 1;
    white-space: nowrap; }
tbody th { font-weight: 500; } .right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers th, .numbers td { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap;
    padding-block: .2rem; }
.numbers td { font-family: var(--mono); font-size: .8rem; } .off { color: var(--bad); font-weight: 600; }
.fixed { white-space: nowrap; } .stack:not(.items) code { overflow-wrap: break-word; }
.items td:nth-child(3) { min-width: 18rem; } .items .value { min-width: 13rem; }
.filter { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin-top: .6rem; font-size: .875rem; }
.filter[hidden] { display: none; }
.filter input, .filter select, button { font: inherit; color: inherit; background: var(--ground); border: 1px solid var(--edge);
  border-radius: 6px; padding: .3rem .6rem; }
.filter input { flex: 1 1 14rem; min-width: 0; max-width: 24rem; }
button { cursor: pointer; font-size: .8rem; } button:hover { border-color: var(--quiet); }
details > summary { cursor: pointer; color: var(--link); font-size: .9rem; margin-top: .6rem; width: fit-content; }
.arms { list-style: none; border: 1px solid var(--rule); border-radius: 8px; }
.arms li + li { border-top: 1px solid var(--rule); } .arms li { padding: .7rem 1.1rem; }
.arms .head { display: grid; grid-template-columns: minmax(8rem, 1.1fr) 2fr max-content max-content;
    gap: .1rem 1.25rem; align-items: baseline; }
.arms details > summary { margin-top: .1rem; } .arms details { position: relative; }
.copy { position: absolute; right: .5rem; margin-top: 1.1rem; } pre + .pairs { margin-top: .6rem; }
.tone { color: var(--tone); font-weight: 600; }

@media (max-width: 42rem) {
  body { font-size: 15px; } main, header, footer { padding-inline: 1rem; } header { padding-top: 1.5rem; }
    .verdict h1 { font-size: 1.6rem; }
  section { margin-top: 2.25rem; } .numbers-strip { gap: .6rem 1.5rem; }
  .plot { grid-template-columns: 3.25rem minmax(0, 1fr); } .plot .code { display: none; }
  .pairs { grid-template-columns: minmax(0, 1fr); gap: 0; } .pairs dd { margin-bottom: .55rem; }
    .pairs dd:last-child { margin: 0; }
  .arms .head { grid-template-columns: 1fr max-content max-content; } .arms .head .purpose { grid-column: 1 / -1;
    order: 1; }
  .stack thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stack, .stack tbody, .stack tr, .stack td, .stack tbody th { display: block; text-align: left; padding: 0;
    border: 0; min-width: 0; }
  .stack tr { padding: .6rem .9rem; border-bottom: 1px solid var(--rule); }
  .stack tr[hidden] { display: none; }
  .stack td[data-label]::before { content: attr(data-label); color: var(--quiet); font: .8rem var(--sans); margin-right: .6em; }
}
@media print { .filter, button, nav { display: none; } .scroll { max-height: none; } }
""" + "\n".join(
    f".g-{group.replace(' ', '-')} {{ fill: {colour}; background: {colour}; }}"
    for group, colour in GROUP_COLOURS.items()
)

SCRIPT = """
"use strict";
for (const box of document.querySelectorAll(".filter")) {
  const [text, group] = box.querySelectorAll("input, select");
  const rows = [...document.querySelectorAll("#items tbody tr")];
  const show = () => {
    const words = text.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const said = row.textContent.toLowerCase();
      row.hidden = !(words.every(word => said.includes(word)) && (!group.value || row.dataset.group === group.value));
      count += !row.hidden;
    }
    box.querySelector("output").value = `${count} of ${rows.length} rows`;
  };
  text.addEventListener("input", show);
  group.addEventListener("change", show);
  box.hidden = false;
  show();
}
for (const area of document.querySelectorAll(".area[data-curve]")) {
  const arms = JSON.parse(document.getElementById(area.dataset.curve + "-data").textContent);
  const values = new Map(Object.entries(arms).map(([arm, points]) => [arm, new Map(points)]));
  const first = Number(area.dataset.first), last = Number(area.dataset.last), count = last - first + 1;
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  area.append(cursor, tip);
  const hide = () => { cursor.hidden = tip.hidden = true; };
  hide();
  area.addEventListener("pointerleave", hide);
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const step = Math.min(last, Math.max(first, first + Math.floor(at * count)));
    const lines = [...values].filter(([, points]) => points.has(step)).map(([arm, points]) => [arm, points.get(step)]);
    if (!lines.length) return hide();
    const place = (step - first + 0.5) / count;
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${100 * place}%`;
    tip.style.right = place > 0.5 ? `calc(${100 * (1 - place)}% + 8px)` : "auto";
    tip.style.left = place > 0.5 ? "auto" : `calc(${100 * place}% + 8px)`;
    const head = document.createElement("b");
    head.textContent = `step ${step}`;
    tip.replaceChildren(head, ...lines.map(([arm, value]) => {
      const line = document.createElement("div"), number = document.createElement("span");
      number.textContent = value;
      line.append(`${arm} `, number);
      return line;
    }));
  });
}
for (const map of document.querySelectorAll(".map")) {
  const readout = map.parentElement.querySelector(".readout"), summary = readout.textContent;
  map.addEventListener("pointerover", event => {
    const title = event.target.closest(".cell")?.querySelector("title");
    readout.textContent = title ? title.textContent : summary;
  });
  map.addEventListener("pointerleave", () => { readout.textContent = summary; });
}
for (const pre of document.querySelectorAll("pre.command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(pre);
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "selected";
    }
  });
  pre.before(button);
}
"""
