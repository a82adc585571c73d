"""The style of the page: light, dark, narrow and on paper. No fonts, images or scripts from anywhere."""

# A backslash at the end of a line joins it with the next; colours are variables, so that dark and print
# only set others.
CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1a2029; --soft: #566070; --line: #e1e5ea; --grid: #eceff3;
  --accent: #1f5fd0; --good: #116b3d; --good-back: #e3f4ea; --bad: #b3261e; --bad-back: #fce8e6;
  --unknown: #566070; --unknown-back: #eef0f3; --warn-back: #fff5dc; --warn: #7a5200;
  --c0: #1f5fd0; --c1: #c2570c; --c2: #0f7d6c; --c3: #8a3ffc; --c4: #b3246b; --c5: #5b6470;
  --code: #f1f3f6;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #0f1319; --card: #181d25; --text: #e7eaee; --soft: #a3adba; --line: #2b323d; --grid: #252b35;
    --accent: #82aefb; --good: #6fd69b; --good-back: #15321f; --bad: #ff9a90; --bad-back: #43191a;
    --unknown: #a3adba; --unknown-back: #262d37; --warn-back: #372b10; --warn: #f0c766;
    --c0: #82aefb; --c1: #f5a45d; --c2: #4fd0bb; --c3: #c19bff; --c4: #f58bbd; --c5: #a3adba;
    --code: #212833;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
}
main, header > div, footer { max-width: 1160px; margin: 0 auto; padding: 0 20px; }
header { background: var(--card); border-bottom: 1px solid var(--line); padding: 28px 0 0; }
h1 { font-size: 27px; line-height: 1.2; margin: 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0 0 4px; letter-spacing: -.01em; }
h3 { font-size: 14px; margin: 20px 0 8px; }
p { margin: 0 0 10px; }
a { color: var(--accent); }
.soft { color: var(--soft); }
.small { font-size: 13px; }
.title { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 12px; }
.facts { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 8px 0 0; padding: 0; list-style: none; color: \
var(--soft); }
.facts b { color: var(--text); font-weight: 600; }
.badge {
  display: inline-flex; align-items: center; gap: 5px; padding: 2px 9px 2px 7px; border-radius: 99px;
  font-size: 12px; font-weight: 650; letter-spacing: .02em; white-space: nowrap;
  color: var(--unknown); background: var(--unknown-back);
}
.badge svg { width: 12px; height: 12px; fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linecap: round; }
.pass { color: var(--good); background: var(--good-back); }
.fail { color: var(--bad); background: var(--bad-back); }
.headline { display: grid; grid-template-columns: repeat(6, 1fr); gap: 10px; margin: 22px 0 0; }
.headline div { border: 1px solid var(--line); border-radius: 10px; padding: 11px 13px 10px; background: var(--page); }
.headline dt { color: var(--soft); font-size: 13px; }
.headline dd { margin: 0; }
.headline .value { font-size: 22px; font-weight: 650; line-height: 1.3; letter-spacing: -.01em; font-variant-numeric: \
tabular-nums; }
.headline .how { color: var(--soft); font-size: 12px; line-height: 1.35; }
nav { display: flex; flex-wrap: wrap; gap: 2px 18px; margin-top: 18px; padding-bottom: 12px; font-size: 14px; }
nav a { text-decoration: none; padding: 4px 0; }
nav a:hover { text-decoration: underline; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px; margin: \
18px 0; scroll-margin-top: 12px; }
.error { background: var(--bad-back); color: var(--bad); border-radius: 10px; padding: 10px 14px; margin: 16px 0 0; \
overflow-wrap: anywhere; white-space: pre-wrap; }
.warning { background: var(--warn-back); color: var(--warn); border-radius: 8px; padding: 7px 12px; margin: 8px 0; \
overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 18px 0 0; }
p + .scroll { margin-top: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 650; padding: 0 0 6px; }
th, td { text-align: left; vertical-align: top; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 550; font-size: 13px; }
tbody th { color: var(--text); font-weight: 550; font-size: 14px; }
tbody tr:last-child > * { border-bottom: 0; }
.slim, .facts-table { max-width: 620px; }
.facts-table th { color: var(--soft); font-weight: 400; width: 40%; }
.num { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
td.any { overflow-wrap: anywhere; min-width: 9em; }
.forest { max-width: 680px; margin-bottom: 18px; }
code, pre, .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; \
font-size: 13px; }
pre { background: var(--code); border-radius: 8px; padding: 10px 12px; margin: 0; white-space: pre-wrap; \
overflow-wrap: anywhere; tab-size: 4; }
.proof td, .proof th { padding-top: 10px; padding-bottom: 10px; }
.proof .name { width: 46%; }
.proof .state { width: 108px; }
.proof .how { display: block; color: var(--soft); font-size: 13px; font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: 22px 24px; \
margin-top: 14px; }
.charts.first { grid-template-columns: 1fr; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 650; margin-bottom: 4px; }
figcaption .soft { font-weight: 400; font-size: 13px; margin-left: 5px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 13px; font-weight: 400; color: var(--soft); \
min-height: 20px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; overflow-wrap: anywhere; }
.legend svg { width: 26px; height: 8px; flex: none; }
figure > svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; fill: \
var(--text); font-variant-numeric: tabular-nums; }
svg .tick, svg .axis { fill: var(--soft); font-size: 11.5px; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .base { stroke: var(--soft); stroke-width: 1; opacity: .55; }
svg polyline { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
svg polyline.faint { stroke-width: 1.2; opacity: .45; }
svg .dot { fill: var(--c); stroke: var(--card); stroke-width: 1; }
svg .hidden { fill: transparent; stroke: none; }
svg .hidden:hover { fill: var(--c); }
svg .bar { stroke: var(--c); stroke-width: 2.4; opacity: .5; stroke-linecap: round; }
svg .level { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 5 4; }
svg .chance { stroke: var(--c1); stroke-width: 2; }
svg .column { fill: var(--c0); opacity: .85; }
svg .load { fill: var(--c0); stroke: var(--grid); stroke-width: .5; }
svg .mark { stroke: var(--c1); stroke-width: 1.4; stroke-dasharray: 4 3; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); } .s4 { --c: var(--c4); \
} .s5 { --c: var(--c5); }
.s1 polyline { stroke-dasharray: 7 3; } .s2 polyline { stroke-dasharray: 2 4; } .s3 polyline { stroke-dasharray: 9 3 \
2 3; }
.s4 polyline { stroke-dasharray: 4 2; } .s5 polyline { stroke-dasharray: 1 3; }
.solid polyline { stroke-dasharray: none; } .other polyline { stroke-dasharray: 7 5; stroke-linecap: butt; }
.o0 { --c: var(--c4); } .o1 { --c: var(--c2); }
.narrow { display: none; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 8px 36px; \
align-items: start; }
.two > * { min-width: 0; }
.charts + details { margin-top: 20px; }
details { border-top: 1px solid var(--line); padding: 9px 0; }
summary { cursor: pointer; font-weight: 600; }
summary .soft { font-weight: 400; }
details > :not(summary) { margin-top: 10px; }
.sample { display: grid; grid-template-columns: 84px 1fr; gap: 6px 12px; padding: 12px 0; border-top: 1px dashed \
var(--line); margin: 0; }
.sample dt { color: var(--soft); font-size: 13px; padding-top: 2px; }
.sample dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16em; overflow: auto; }
.sample .answer { background: var(--code); border-radius: 8px; padding: 6px 10px; }
footer { padding-bottom: 36px; color: var(--soft); font-size: 13px; }
@media (max-width: 900px) { .headline { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 620px) {
  main, header > div, footer { padding-left: 14px; padding-right: 14px; }
  section { padding: 16px 14px; margin: 12px 0; border-radius: 10px; }
  .headline { grid-template-columns: 1fr 1fr; }
  .headline .value { font-size: 20px; }
  h1 { font-size: 23px; }
  .wide { display: none; } .narrow { display: block; }
  .proof, .proof tbody, .proof tr, .proof td, .proof th { display: block; width: auto; border: 0; padding: 0; }
  .proof thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  .proof tr { border-bottom: 1px solid var(--line); padding: 12px 0; }
  .proof tr:last-child { border-bottom: 0; }
  .proof .state { margin-bottom: 4px; }
  .proof .name { width: auto; }
  .proof td[data-label] { display: grid; grid-template-columns: 72px 1fr; font-size: 14px; margin-top: 3px; }
  .proof td[data-label]::before { content: attr(data-label); color: var(--soft); }
  .sample { grid-template-columns: 1fr; gap: 2px; }
  .sample dd { margin-bottom: 6px; }
}
@media print {
  @page { size: A4; margin: 14mm 13mm; }
  :root {
    color-scheme: light;
    --page: #fff; --card: #fff; --text: #000; --soft: #444; --line: #ccc; --grid: #e6e6e6; --accent: #000;
    --good: #0b5a32; --good-back: #fff; --bad: #9b1c15; --bad-back: #fff; --unknown: #444; --unknown-back: #fff;
    --warn-back: #fff; --warn: #5c3d00; --code: #f5f5f5;
  }
  body { font-size: 10.5pt; }
  main, header > div, footer { max-width: none; padding: 0; }
  header { padding: 0; border: 0; }
  nav { display: none; }
  section { border: 0; border-top: 1px solid var(--line); border-radius: 0; padding: 12px 0 0; margin: 14px 0 0; }
  .headline { grid-template-columns: repeat(3, 1fr); }
  .headline div { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; }
  .badge, .warning, .error { border: 1px solid currentColor; }
  h2, h3, caption, thead { break-after: avoid; }
  tr, .sample { break-inside: avoid; }
  .scroll { overflow: visible; }
  .sample dd { max-height: none; }
  .charts + details { display: none; }
  .proof .name { width: 40%; }
  #samples details::details-content { content-visibility: visible; display: block; height: auto; }
}
"""
