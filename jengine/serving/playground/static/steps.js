// Each step as a column: above, the tiles of prompts; below, the rows that decode. Below that drawing, its time.

import { colours, prepare, sayEmpty } from "./canvas.js";

const COLUMN = 6, GAP = 1, BETWEEN = 8, TILE_SHARE = 0.3;

export class Steps {
  constructor(canvas, times, detail) {
    Object.assign(this, { canvas, times, detail, steps: [], shown: [], picked: null });
    canvas.addEventListener("pointermove", (event) => this.pick(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.pick(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  draw(steps) {
    this.steps = steps;  // grows in place, so its earlier length is not known
    if (!this.picked) this.say(null);
    const last = steps.at(-1);
    this.drawCells();
    this.drawTimes();
    if (!last) return;
    const rows = `${last.rows} of ${last.all_rows} rows and ${last.tiles} of ${last.all_tiles} tiles used`;
    this.canvas.setAttribute("aria-label", `Rows and tiles of the last ${this.shown.length} steps. The last one: ${rows}`);
    const took = last.measured === null ? "not measured" : `${last.measured} ms`;
    this.times.setAttribute("aria-label", `Time of each step. The last one: ${took}, predicted ${last.predicted} ms`);
  }

  drawCells() {
    const drawing = prepare(this.canvas), { pen, width, height } = drawing;
    const colour = colours();
    if (!this.steps.length) sayEmpty(drawing, "No steps yet");
    this.shown = this.steps.slice(-Math.floor(width / COLUMN));
    const most = (of) => Math.max(1, ...this.shown.map((step) => step[of]));
    const tileHeight = Math.round(height * TILE_SHARE), rowHeight = height - tileHeight - BETWEEN;
    const [mostTiles, mostRows] = [most("all_tiles"), most("all_rows")];
    this.shown.forEach((step, i) => {
      const x = i * COLUMN;
      stack(pen, x, tileHeight, tileHeight, mostTiles, step.tiles, step.all_tiles, colour.prefill, colour.padding);
      stack(pen, x, height, rowHeight, mostRows, step.rows, step.all_rows, colour.decode, colour.padding);
      if (step.first) line(pen, x, height, colour.ink);
      if (step === this.picked) frame(pen, x, height, colour.ink);
    });
  }

  drawTimes() {
    const drawing = prepare(this.times), { pen, width, height } = drawing;
    const colour = colours(), shown = this.shown;
    if (!shown.length) return sayEmpty(drawing, "No times yet");
    const longest = percentile(shown.map((step) => Math.max(step.measured ?? 0, step.predicted)), 0.98) * 1.15 || 1;
    const y = (ms) => height - 2 - Math.min(ms / longest, 1) * (height - 16);
    pen.strokeStyle = colour.line;
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    for (const part of [0.5, 1]) {
      const at = Math.round(y((longest / 1.15) * part)) + 0.5;
      pen.beginPath();
      pen.moveTo(0, at);
      pen.lineTo(width, at);
      pen.stroke();
    }
    pen.fillStyle = colour.decode;
    shown.forEach((step, i) => {
      if (step.measured !== null) dot(pen, i * COLUMN + COLUMN / 2, y(step.measured));
    });
    pen.strokeStyle = colour.ink;
    pen.lineWidth = 1.25;
    pen.beginPath();
    shown.forEach((step, i) => {
      pen.moveTo(i * COLUMN, y(step.predicted));
      pen.lineTo((i + 1) * COLUMN, y(step.predicted));
    });
    pen.stroke();
    for (const part of [0.5, 1]) label(pen, `${figure((longest / 1.15) * part)} ms`, y((longest / 1.15) * part), colour);
  }

  at(event) {
    const index = Math.floor((event.clientX - this.canvas.getBoundingClientRect().left) / COLUMN);
    return this.shown[index] ?? null;
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.shown.length) return;
    event.preventDefault();
    const now = this.shown.indexOf(this.picked);
    const next = now < 0 ? this.shown.length - 1 : Math.min(Math.max(now + by, 0), this.shown.length - 1);
    this.pick(this.shown[next]);
  }

  pick(step) {
    this.picked = step;
    this.say(step);
    this.drawCells();
  }

  say(step) {
    const hint = this.steps.length ? "Point at a step, or focus the drawing and use the arrow keys." : "No steps yet: send a message.";
    this.detail.textContent = step ? words(step) : hint;
  }
}

function words(step) {
  const tiles = step.all_tiles ? `, ${step.tiles} of ${step.all_tiles} tiles (${step.prompt_tokens} prompt tokens, ${step.padded_tokens} padding)` : "";
  const took = step.measured === null ? "not measured" : `${figure(step.measured)} ms`;
  const why = step.reason ? `; ${step.reason}` : "";
  return `Step ${step.n}: ${step.rows} of ${step.all_rows} rows${tiles}; ${took}, predicted ${figure(step.predicted)} ms${why}`;
}

// Cells from the bottom up: those that are used, then padding.
function stack(pen, x, bottom, height, most, used, all, colour, padding) {
  const cell = height / most, gap = cell > 3 ? 1 : 0;
  for (let i = 0; i < all; i++) {
    pen.fillStyle = i < used ? colour : padding;
    pen.fillRect(x, bottom - (i + 1) * cell + gap, COLUMN - GAP, cell - gap);
  }
}

function line(pen, x, height, colour) {
  pen.fillStyle = colour;
  pen.fillRect(x - 1, 0, 1, height);
}

function frame(pen, x, height, colour) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.strokeRect(x - 0.5, 0.5, COLUMN, height - 1);
}

// On the left, over what is drawn there.
function label(pen, text, y, colour) {
  pen.fillStyle = colour.surface;
  pen.fillRect(0, y - 7, pen.measureText(text).width + 6, 14);
  pen.fillStyle = colour.soft;
  pen.fillText(text, 0, y + 4);
}

function dot(pen, x, y) {
  pen.beginPath();
  pen.arc(x, y, 1.8, 0, 7);
  pen.fill();
}

function percentile(numbers, share) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : 0;
}

export function figure(ms) {
  return ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2);
}
