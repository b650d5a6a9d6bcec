"""The page's drawing of steps, in Node.js without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.docs.blocks import ROOT

STATIC = ROOT / "jengine" / "serving" / "playground" / "static"
NODE = shutil.which("node")
SCRIPT = """
const pen = new Proxy({}, {
  get: (_, name) => name === "measureText" ? () => ({ width: 1 }) : () => {}, set: () => true,
});
const canvas = () => ({ addEventListener() {}, setAttribute() {}, clientWidth: 300, clientHeight: 100,
  getBoundingClientRect: () => ({ left: 0, width: 300, height: 100 }), getContext: () => pen });
const element = () => ({ style: {}, remove() {}, ...canvas() });
globalThis.document = { body: { append() {} }, createElement: element };
globalThis.window = { devicePixelRatio: 1, matchMedia: element };
globalThis.getComputedStyle = () => ({ fontFamily: "x", color: "#000" });
const { Steps } = await import(MODULE);
const detail = {}, steps = [], drawn = new Steps(canvas(), canvas(), detail), said = [];
drawn.draw(steps);
said.push(detail.textContent);
steps.push({ n: 1, rows: 1, all_rows: 4, tiles: 0, all_tiles: 0, measured: 2, predicted: 2 });  // in place
drawn.draw(steps);
said.push(detail.textContent);
drawn.pick(steps[0]);
drawn.draw(steps);
said.push(detail.textContent);
console.log(JSON.stringify(said));
"""


@pytest.mark.skipif(NODE is None, reason="needs node on the PATH")
def test_the_line_below_follows_the_steps() -> None:
    script = SCRIPT.replace("MODULE", json.dumps((STATIC / "steps.js").as_uri()))
    done = subprocess.run(
        [NODE or "", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    empty, hint, picked = json.loads(done.stdout)
    assert empty.startswith("No steps yet") and hint.startswith("Point at a step")
    assert picked.startswith("Step 1: 1 of 4 rows")
