// Everything of the engine that is words and numbers, and the queue's curve.

import { colours, prepare, sayEmpty } from "./canvas.js";
import { figure } from "./steps.js";

const ROWS = [["queue", "Queue"], ["first_token", "First token"], ["per_token", "Per token"], ["whole", "Whole request"]];
const $ = (id) => document.getElementById(id);

export function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

export function showFigures(event, median) {
  $("running").textContent = event.running;
  $("waiting").textContent = event.waiting;
  $("rate").textContent = event.tokens_per_second === null ? "–" : Math.round(event.tokens_per_second).toLocaleString("en");
  $("median").replaceChildren(median === null ? "–" : figure(median), element("small", median === null ? "" : " ms"));
  $("strategy").textContent = event.strategy;
}

export function showLatency(latency) {
  $("ended").textContent = `${latency.requests} request${latency.requests === 1 ? "" : "s"} of the last minute`;
  $("latency").replaceChildren(
    ...ROWS.map(([name, label]) => {
      const row = element("tr"), head = element("th", label);
      head.scope = "row";
      const values = latency[name] ?? [null, null, null];
      row.append(head, ...values.map((ms) => element("td", ms === null ? "–" : figure(ms))));
      return row;
    }),
  );
}

export function showExplanation(explanation) {
  if (!explanation || !explanation.steps) {
    $("bound").textContent = "";
    $("explanation").replaceChildren(element("p", "Nothing ran in the last minute.", "quiet"));
    return;
  }
  $("bound").textContent = `bound by ${explanation.bound.replaceAll("_", " ")}`;
  const findings = explanation.findings.map(finding);
  const fine = element("p", `${explanation.steps} steps in ${explanation.seconds.toFixed(2)} s; nothing to change.`, "quiet");
  $("explanation").replaceChildren(...(findings.length ? findings : [fine]));
}

function finding(found) {
  const made = element("div", undefined, "finding"), head = element("h3", found.summary), list = element("dl");
  head.append(" ", element("small", `${Math.round(100 * found.share)} % of the time`));
  const facts = [...Object.entries(found.evidence), [`Change ${found.option}`, found.change], ["Predicted", found.effect]];
  for (const [name, value] of facts) list.append(element("dt", name), element("dd", value));
  made.append(head, list);
  return made;
}

export function drawQueue(loads) {
  const drawing = prepare($("queue")), { pen, width, height } = drawing;
  const idle = loads.every((load) => !load.running && !load.waiting);
  if (idle) sayEmpty(drawing, "No requests in the last two minutes");
  const colour = colours(), most = Math.max(1, ...loads.map((load) => load.running + load.waiting));
  const step = width / 240, bottom = height - 1, start = width - loads.length * step;
  loads.forEach((load, i) => {
    const x = start + i * step, running = (load.running / most) * (height - 4), waiting = (load.waiting / most) * (height - 4);
    pen.fillStyle = colour.decode;
    pen.fillRect(x, bottom - running, step + 0.3, running);
    pen.fillStyle = colour.prefill;
    pen.fillRect(x, bottom - running - waiting, step + 0.3, waiting);
  });
  pen.fillStyle = colour.line;
  pen.fillRect(0, bottom, width, 1);
  $("queued").textContent = idle ? "" : `The last two minutes; at most ${most} at once`;
}
