"""The report's style, in light and dark."""

STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --back: #fff; --soft: #eef1f6; --line: #cfd6e2; --step: #4a63d8; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8f0; --back: #14181f; --soft: #222936; --line: #3a4456; --step: #8fa2ff; } }
body { margin: 0; background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 16px 20px 60px; }
h1 { font-size: 24px; margin: 8px 0; overflow-wrap: anywhere; } h2 { margin: 36px 0 8px; border-bottom: 2px solid var(--line); }
h3 { margin: 22px 0 6px; font-size: 16px; }
table { border-collapse: collapse; margin: 6px 0; } th { text-align: left; }
td, th { padding: 2px 14px 2px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: break-word; }
td:first-child { white-space: nowrap; }
pre, code { font-family: ui-monospace, monospace; font-size: 12.5px; } pre { background: var(--soft); padding: 10px; overflow-x: auto; }
.finding { background: var(--soft); border-left: 5px solid #d0433b; padding: 4px 14px; margin: 12px 0; } .finding h3 { margin: 8px 0; }
.good { background: var(--soft); border-left: 5px solid #2f9e5b; padding: 8px 14px; }
.missing { background: var(--soft); border-left: 5px solid #d99a1c; padding: 6px 14px; margin: 8px 0; } .missing ul { margin: 2px 0; }
.kind { color: #fff; border-radius: 4px; padding: 1px 7px; font-size: 13px; background: #666; }
.kind.garbage_collection { background: #d0433b; } .kind.lock { background: #b06a00; } .kind.system_calls { background: #1f7f86; }
.kind.interpreter_lock { background: #8440b8; } .kind.heap_growth { background: #58723a; }
svg { display: block; margin: 4px 0; } svg text { font: 11px ui-monospace, monospace; fill: #14181f; pointer-events: none; }
svg text.name, svg text.tick { fill: var(--text); } svg line { stroke: var(--line); stroke-width: .6; }
.ground { fill: var(--soft); } .step { fill: var(--step); }
.garbage_collection { fill: #e2655d; } .lock { fill: #e5a53a; } .system_calls { fill: #45b3ba; } .interpreter_lock { fill: #b184d9; }
.f0 { fill: #f2b28c; } .f1 { fill: #f3c76f; } .f2 { fill: #e8a9a0; } .f3 { fill: #dfc59a; } .f4 { fill: #f0d48a; } .f5 { fill: #eab676; }
.f6 { fill: #f6c2a6; } .f7 { fill: #e3b5b5; }
.s0 { fill: #8fb4f0; } .s1 { fill: #b3c8a0; } .s2 { fill: #f0c98f; } .s3 { fill: #d9a0c8; } .s4 { fill: #c9ced8; } .s5 { fill: #9fd3c7; }
.s6 { fill: #e7b0a0; } .s7 { fill: #c3b5e8; }
summary { cursor: pointer; padding: 3px 0; } details { margin: 4px 0; }
"""
