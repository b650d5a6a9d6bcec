// Pictures that go with the next message: chosen, pasted or dropped. They are shown as drawings, never as addresses.

import { element } from "./figures.js";

const READ = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]; // by the server
const MOST_BYTES = 1 << 20; // of a file that is sent as it is; a request has a limit, too
const [LONGEST, THUMBNAIL] = [2048, 96]; // pixels of the longer side

export class Pictures {
  constructor({ button, input, strip, area }) {
    Object.assign(this, { button, input, strip, on: false });
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => (this.add(input.files), (input.value = "")));
    area.addEventListener("paste", (event) => this.given(event, event.clipboardData));
    area.addEventListener("dragover", (event) => this.on && event.preventDefault());
    area.addEventListener("drop", (event) => this.given(event, event.dataTransfer));
  }

  // Whether messages may have pictures.
  use(on) {
    this.on = on;
    this.button.hidden = !on;
    if (!on) this.put([]);
  }

  given(event, data) {
    const files = [...data.files].filter((file) => file.type.startsWith("image/"));
    if (!this.on || !files.length) return;
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    for (const file of files) {
      try {
        this.strip.append(this.box(await read(file)));
      } catch {
        this.strip.append(element("p", `${file.name}: this browser cannot read it.`, "error"));
      }
    }
    this.strip.hidden = !this.strip.children.length;
  }

  box(picture) {
    const box = element("div", undefined, "picture");
    const remove = element("button", "×", "quiet");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => (box.remove(), (this.strip.hidden = !this.strip.children.length)));
    box.append(picture.drawing, remove);
    box.picture = picture;
    return box;
  }

  // The pictures, in order; the next message has none of them.
  take() {
    const taken = [...this.strip.children].map((box) => box.picture).filter(Boolean);
    this.put([]);
    return taken;
  }

  put(pictures) {
    this.strip.replaceChildren(...pictures.map((picture) => this.box(picture)));
    this.strip.hidden = !pictures.length;
  }
}

export function partsOf(text, pictures) {
  if (!pictures.length) return text;
  const images = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...images, { type: "text", text }] : images;
}

async function read(file) {
  const image = await createImageBitmap(file);
  const drawing = drawn(image, THUMBNAIL);
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", file.name);
  const whole = READ.includes(file.type) && file.size <= MOST_BYTES;
  const url = whole ? await dataUrl(file) : drawn(image, LONGEST, "white").toDataURL("image/jpeg", 0.9);
  image.close();
  return { name: file.name, url, drawing };
}

function drawn(image, longest, ground) {
  const canvas = document.createElement("canvas"), scale = Math.min(1, longest / Math.max(image.width, image.height));
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  if (ground) {
    context.fillStyle = ground;
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
