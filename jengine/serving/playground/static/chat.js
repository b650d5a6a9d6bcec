// The conversation: text only ever becomes text nodes, those of answers in elements for their Markdown.

import { element } from "./figures.js";
import { build, parse } from "./markdown.js";
import { Pictures, partsOf } from "./pictures.js";
import { makeFields, samplingOf } from "./sampling.js";
import { events } from "./server.js";

const $ = (id) => document.getElementById(id);
const EMPTY = {
  chat: "Say something. What the engine does with it shows beside this.",
  complete: "This model continues a text. Begin one, such as: def fibonacci(n):",
};

// Browsers allow this on localhost and over HTTPS only.
function copyButton(shown) {
  const button = element("button", "Copy", "quiet copy");
  button.type = "button";
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(shown.source || shown.text.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

function copy(drawing) {
  const copied = drawing.cloneNode();
  copied.getContext("2d").drawImage(drawing, 0, 0);
  return copied;
}

export class Chat {
  constructor() {
    this.messages = []; // of the conversation, as the API takes them
    this.running = null; // AbortController of the answer that comes
    this.model = null;
    this.pictures = new Pictures({ button: $("picture"), input: $("file"), strip: $("pictures"), area: $("chat") });
    makeFields($("fields"));
    $("ask").addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    $("prompt").addEventListener("keydown", (event) => this.key(event));
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    for (const radio of this.modes) radio.addEventListener("change", () => this.clear());
    this.clear();
  }

  get modes() {
    return document.querySelectorAll("input[name=mode]");
  }

  get mode() {
    return [...this.modes].find((radio) => radio.checked)?.value ?? "complete";
  }

  // What can be asked is known from when the engine has said what it serves.
  use(model) {
    if (["name", "chat", "images"].every((fact) => this.model?.[fact] === model[fact])) return;
    this.model = model;
    for (const radio of this.modes) {
      radio.disabled = radio.value === "chat" && !model.chat;
      radio.checked = radio.value === (model.chat ? "chat" : "complete");
    }
    this.clear();
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    } else if (event.key === "Escape") this.running?.abort();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    const label = this.mode === "chat" ? "Message" : "Text to continue";
    [$("prompt-label").textContent, $("prompt").placeholder] = [label, label];
    $("system-box").hidden = this.mode !== "chat";
    this.pictures.use(this.mode === "chat" && Boolean(this.model?.images));
    $("log").replaceChildren(element("p", EMPTY[this.mode], "empty"));
  }

  async send() {
    const text = $("prompt").value;
    if (this.running) return;
    const pictures = this.pictures.take();
    if (!text.trim() && !pictures.length) return;
    $("log").querySelector(".empty")?.remove();
    const chat = this.mode === "chat";
    if (chat) {
      const { box, text: shown } = this.show("user");
      shown.textContent = text;
      box.prepend(...pictures.map(({ drawing }) => drawing));
      this.follow(true);
    }
    const shown = this.show(chat ? "assistant running" : "complete running");
    if (!chat) shown.text.append(element("span", text, "given"));
    $("prompt").value = "";
    this.busy(new AbortController());
    const { signal } = this.running;
    const messages = this.messages;
    const body = { model: this.model?.name, stream: true, stream_options: { include_usage: true }, ...samplingOf($("fields")) };
    const asked = { role: "user", content: partsOf(text, pictures) }, rules = $("system").value.trim();
    const system = rules ? [{ role: "system", content: rules }] : [];
    const [path, given] = chat ? ["/v1/chat/completions", { messages: [...system, ...messages, asked] }] : ["/v1/completions", { prompt: text }];
    try {
      const answer = await this.answer(path, { ...body, ...given }, signal, shown);
      if (chat) messages.push(asked, { role: "assistant", content: answer });
    } catch (error) {
      if (error.name !== "AbortError") shown.box.append(element("p", error.message, "error"));
      else shown.note.textContent ||= "stopped";
      if (!$("prompt").value) {
        $("prompt").value = text;
        this.pictures.put(pictures.map((picture) => ({ ...picture, drawing: copy(picture.drawing) })));
      }
    } finally {
      shown.box.classList.remove("running");
      shown.render();
      if (shown.text.textContent) shown.box.append(copyButton(shown));
      this.busy(null);
    }
  }

  // Writes the answer as it comes; returns its text.
  async answer(path, body, signal, shown) {
    const begun = performance.now();
    let [first, whole, reason, usage] = [0, "", "", null];
    const note = () => {
      const seconds = (performance.now() - begun) / 1000, tokens = usage?.completion_tokens;
      const ended = reason === "length" ? ", cut at max tokens" : reason && reason !== "stop" ? `, ${reason}` : "";
      shown.note.textContent = first ? `${tokens ?? "?"} tokens in ${seconds.toFixed(2)} s, the first after ${Math.round(first - begun)} ms${ended}` : "no tokens";
    };
    for await (const data of events(path, { body, signal })) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const [choice] = event.choices ?? [];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const text = choice.text ?? choice.delta?.content ?? "";
      if (choice.delta?.reasoning_content) shown.think(choice.delta.reasoning_content);
      if (text || choice.delta?.reasoning_content) first ||= performance.now();
      whole += text;
      shown.write(text);
    }
    note();
    return whole;
  }

  show(kind) {
    const box = element("div", undefined, `message ${kind}`);
    const [thoughts, text, note] = [element("div", "", "thoughts"), element("div", "", "text"), element("p", "", "note")];
    thoughts.hidden = true;
    const marked = kind.startsWith("assistant");
    text.classList.toggle("marked", marked);
    box.append(thoughts, text, note);
    $("log").append(box);
    this.follow(true);
    const write = (to, more) => {
      const atEnd = this.atEnd;
      to.append(more);
      this.follow(atEnd);
    };
    const think = (more) => ((thoughts.hidden = false), write(thoughts, more));
    const shown = { box, text, note, think, source: "", asked: 0 };
    shown.render = () => {
      cancelAnimationFrame(shown.asked);
      shown.asked = 0;
      if (!marked) return;
      const atEnd = this.atEnd;
      text.replaceChildren(build(parse(shown.source)));
      this.follow(atEnd);
    };
    shown.write = (more) => {
      if (!more) return;
      if (!marked) return write(text, more);
      shown.source += more;
      shown.asked ||= requestAnimationFrame(shown.render); // once for all that comes until then
    };
    return shown;
  }

  get atEnd() {
    const log = $("log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  }

  follow(wanted) {
    if (wanted) $("log").scrollTop = $("log").scrollHeight;
  }

  busy(running) {
    this.running = running;
    $("send").disabled = Boolean(running);
    $("stop").hidden = !running;
  }
}
