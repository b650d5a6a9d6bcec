// Puts the page together.

import { dark } from "./canvas.js";
import { Chat } from "./chat.js";
import { drawQueue, showExplanation, showFigures, showLatency } from "./figures.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { drawPages } from "./pages.js";
import { useKey } from "./server.js";
import { Steps } from "./steps.js";

const $ = (id) => document.getElementById(id);
const NOTICE = 15000; // ms that a restart is shown

const chat = new Chat();
const history = new History();
const steps = new Steps($("steps"), $("times"), $("step"));
let pages = null, noticeEnds = 0;

function draw() {
  steps.draw(history.steps);
  drawQueue(history.loads);
  drawPages($("pages"), $("owners"), pages);
}

function notice(text, ends = Infinity) {
  noticeEnds = ends;
  if ($("notice").textContent !== text) $("notice").textContent = text;
  $("notice").hidden = !text;
}

function onEvent(event) {
  if (event.model) {
    chat.use(event.model);
    $("model").textContent = [event.model.name, event.model.devices, event.model.dtype].filter(Boolean).join(" · ");
    document.title = `${event.model.name} – jengine`;
  }
  const restarted = history.add(event);
  if (event.state !== "serving") notice(`The engine does not answer yet: ${event.why}. This page goes on when it does.`);
  else if (restarted) notice("The engine was restarted. Requests that ran have ended.", performance.now() + NOTICE);
  else if (noticeEnds === Infinity || performance.now() > noticeEnds) notice("");
  if (event.steps) {
    pages = event.pages;
    showFigures(event, history.median);
    showLatency(event.latency);
    showExplanation(event.explanation);
  }
  if (!document.hidden) draw();
}

function onState(state, words) {
  $("state").dataset.state = state === "refused" || state === "key" ? "waiting" : state;
  if ($("state").textContent !== words) $("state").textContent = words;
  $("key-form").hidden = !(state === "key" || state === "refused");
  if (state === "lost") notice("No connection to the server. Trying again.");
  if (state === "refused") notice(`${words}. The chat works with this key.`);
  if (state === "key") notice("This server asks for an API key. It stays in this page's memory, and is gone when the page is.");
}

const live = new Live(onEvent, onState);

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key").value = "";
  live.restart();
});
window.addEventListener("resize", draw);
dark.addEventListener("change", draw);
document.addEventListener("visibilitychange", () => document.hidden || draw());

showLatency({ requests: 0 });
draw();
live.run();
