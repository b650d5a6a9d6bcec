// Pages by owner, as a map of cells: each request that runs in its colour, then those that are cached, then those that are free.

import { colourOf, colours, prepare, sayEmpty } from "./canvas.js";

const LEAST = 7; // pixels of a cell

export function drawPages(canvas, words, pages) {
  const drawing = prepare(canvas), { pen, width, height } = drawing;
  if (!pages) return sayEmpty(drawing, "Not known yet");
  const most = Math.floor(width / LEAST) * Math.floor(height / LEAST);
  const each = Math.max(1, Math.ceil(pages.all / most)); // pages of a cell
  const cells = cellsOf(pages, each);
  const size = Math.max(LEAST, Math.min(16, Math.floor(Math.sqrt((width * height) / Math.max(cells.length, 1)))));
  const columns = Math.floor(width / size);
  cells.forEach((colour, i) => {
    pen.fillStyle = colour;
    pen.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  });
  words.textContent = summary(pages, each);
  canvas.setAttribute("aria-label", `Pages by owner: ${words.textContent}`);
}

function cellsOf(pages, each) {
  const colour = colours();
  const held = pages.holders.reduce((sum, [, count]) => sum + count, pages.others);
  const shrink = held > pages.owned ? pages.owned / held : 1; // shared pages count for each holder
  const owners = [];
  for (const [number, count] of pages.holders) owners.push(...Array(Math.round((count * shrink) / each) || 1).fill(colourOf(number)));
  owners.push(...Array(Math.round((pages.others * shrink) / each)).fill(colour.soft));
  const all = Math.ceil(pages.all / each), cached = Math.round(pages.cached / each);
  const cells = [...owners, ...Array(cached).fill(colour.cached)].slice(0, all);
  return [...cells, ...Array(all - cells.length).fill(colour.padding)];
}

function summary(pages, each) {
  const free = pages.all - pages.owned - pages.cached;
  const count = pages.holders.length;
  const by = count ? ` by ${count} request${count > 1 ? "s" : ""}` : "";
  const cell = each > 1 ? `; a cell is ${each} pages` : "";
  return `${pages.owned} in use${by}, ${pages.cached} cached, ${free} free${cell}`;
}
