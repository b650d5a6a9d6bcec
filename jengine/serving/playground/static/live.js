// The engine's events, for as long as the page is open: reconnects, with growing pauses, and says how things are.

import { Refused, events } from "./server.js";

const FIRST_PAUSE = 500, LONGEST_PAUSE = 5000; // ms
const SILENCE = 4000; // ms without an event, after which the connection counts as lost

export class Live {
  // onEvent(event); onState(state, words), of "serving", "waiting", "lost", "key" and "refused".
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.pause = FIRST_PAUSE;
    this.restart = () => {};
  }

  async run() {
    for (;;) {
      const stop = new AbortController();
      const woken = new Promise((resolve) => (this.restart = resolve));
      woken.then(() => stop.abort());
      const pause = await this.follow(stop).catch((error) => this.explain(error));
      await Promise.race([woken, new Promise((resolve) => pause && setTimeout(resolve, pause))]);
      this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
    }
  }

  async follow(stop) {
    let timer = setTimeout(() => stop.abort(), SILENCE);
    try {
      for await (const data of events("/page/live", { signal: stop.signal })) {
        clearTimeout(timer);
        timer = setTimeout(() => stop.abort(), SILENCE);
        this.pause = FIRST_PAUSE;
        const event = JSON.parse(data);
        this.onState(event.state, event.state === "serving" ? "serving" : event.why);
        this.onEvent(event);
      }
    } finally {
      clearTimeout(timer);
    }
    throw new Error("the stream has ended");
  }

  // Returns after how many ms to try again; 0 is not before there is another key.
  explain(error) {
    const status = error instanceof Refused ? error.status : 0;
    if (status === 401) this.onState("key", "an API key is needed");
    else if (status === 403) this.onState("refused", error.message);
    else this.onState("lost", status ? error.message : "no connection");
    return status === 401 || status === 403 ? 0 : this.pause;
  }
}
