// A canvas that is sharp on every screen, and the theme's colours.

export function prepare(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(Math.round(width * scale), 1), Math.max(Math.round(height * scale), 1)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// Says in the middle of a drawing that there is nothing to draw.
export function sayEmpty({ pen, width, height }, words) {
  pen.fillStyle = colours().soft;
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textAlign = "center";
  pen.fillText(words, width / 2, height / 2 + 4);
  pen.textAlign = "start";
}

const probe = document.createElement("canvas").getContext("2d");
let known = null;

// A custom property may hold light-dark(); a property that is used resolves it.
export function colours() {
  if (known) return known;
  const made = {};
  const element = document.createElement("i");
  document.body.append(element);
  for (const name of ["ink", "soft", "line", "decode", "prefill", "padding", "cached", "accent", "surface"]) {
    element.style.color = `var(--${name})`;
    probe.fillStyle = getComputedStyle(element).color;
    made[name] = probe.fillStyle;
  }
  element.remove();
  return (known = made);
}

export const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => (known = null));

// A request keeps its colour; neighbours differ.
export function colourOf(number) {
  const hue = (number * 137.508 + 205) % 360;
  return dark.matches ? `hsl(${hue} 55% 62%)` : `hsl(${hue} 58% 48%)`;
}
