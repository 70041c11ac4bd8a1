"""How a report looks: light and dark by the reader's own choice, and on paper."""

CSS = """
:root{--bg:#fff;--fg:#1c2330;--dim:#667085;--line:#d7dce4;--soft:#f4f6f9;--c1:#2563eb;--c2:#d97706;--c3:#7c3aed;
--c4:#0d9488;--good:#15803d;--bad:#c81e1e;--warn:#b45309;--s1:#16a34a;--s2:#0891b2;--s3:#d97706;--s4:#c3c9d4;
color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){:root{--bg:#12161d;--fg:#e4e8ef;--dim:#93a0b4;--line:#2f3847;
--soft:#1a202a;--c1:#60a5fa;--c2:#fbbf24;--c3:#a78bfa;--c4:#2dd4bf;--good:#4ade80;--bad:#f87171;--warn:#fbbf24;
--s1:#22c55e;--s2:#22d3ee;--s3:#fbbf24;--s4:#475063}}
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 20px 60px;max-width:820px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:34px 0 8px}
h3{font-size:15px;margin:18px 0 4px}
p{margin:4px 0 10px}
.dim,.note{color:var(--dim)}
.note{font-size:13px}
.good{color:var(--good)}
.bad{color:var(--bad)}
.warn{color:var(--warn)}
table{border-collapse:collapse;width:100%;font-size:13.5px;margin:6px 0 12px}
th{text-align:left;font-weight:600;color:var(--dim)}
th,td{padding:3px 12px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
th.w,td.w{overflow-wrap:anywhere}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font:12.5px/1.45 ui-monospace,monospace}
pre{background:var(--soft);padding:8px 10px;margin:4px 0 10px;white-space:pre-wrap;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:6px 26px;margin:12px 0}
.facts div{min-width:90px}
.facts b{display:block;font-size:19px;font-weight:600}
.facts span{color:var(--dim);font-size:12.5px}
figure{margin:10px 0 4px}
figure svg{width:100%;height:auto;display:block}
.small{display:grid;grid-template-columns:1fr 1fr;gap:6px 16px}
@media(max-width:600px){.small{grid-template-columns:1fr}}
.key i{display:inline-block;width:11px;height:11px;margin:0 5px 0 14px;border-radius:2px;vertical-align:-1px}
svg text{font:11px system-ui,sans-serif;fill:var(--fg)}
svg .tick{fill:var(--dim)}
svg .end{text-anchor:end}
svg .middle{text-anchor:middle}
svg .grid{stroke:var(--line);stroke-width:1}
svg .axis{stroke:var(--dim)}
svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round}
svg .band{opacity:.2;stroke:none}
svg .line.c1{stroke:var(--c1)}
svg .line.c2{stroke:var(--c2)}
svg .band.c1,svg .dot.c1,svg .legend.c1{fill:var(--c1)}
svg .band.c2,svg .dot.c2,svg .legend.c2{fill:var(--c2)}
svg .attempt{stroke:var(--dim);stroke-dasharray:5 3}
svg .life{stroke:var(--c3);stroke-dasharray:2 3}
svg .checkpoint{stroke:var(--c4);stroke-width:1.4}
svg .incident,svg .odd{fill:var(--bad)}
svg .odd{font-weight:700}
svg .empty{fill:var(--soft)}
svg .name{font-weight:600}
svg .s1,.key .s1{fill:var(--s1);background:var(--s1)}
svg .s2,.key .s2{fill:var(--s2);background:var(--s2)}
svg .s3,.key .s3{fill:var(--s3);background:var(--s3)}
svg .s4,.key .s4{fill:var(--s4);background:var(--s4)}
svg .bar{fill:var(--c1)}
svg .bar.finished{fill:var(--good)}
svg .bar.crashed,svg .bar.hung{fill:var(--bad)}
svg .bar.stopped{fill:var(--dim)}
svg .on{fill:var(--bg);font-weight:600}
@media print{body{max-width:none;padding:0;font-size:11pt}h2{break-after:avoid}figure,tr,.incident{
break-inside:avoid}a{color:inherit}}
"""
