// What the page remembers of the engine: bounded.

const MOST_STEPS = 600, MOST_LOADS = 240;

export class History {
  constructor() {
    this.steps = [];
    this.loads = [];
    this.engine = null;
  }

  // Returns whether another engine has begun.
  add(event) {
    const restarted = this.engine !== null && event.engine > 0 && event.engine !== this.engine;
    if (event.engine) this.engine = event.engine;
    if (event.steps) {
      event.steps.forEach((step, i) => this.steps.push({ ...step, first: restarted && i === 0, gap: i === 0 && event.skipped > 0 }));
      this.steps.splice(0, this.steps.length - MOST_STEPS);
    }
    const most = (name) => Math.max(event[name] ?? 0, ...(event.steps ?? []).map((step) => step[name]));
    this.loads.push({ running: most("running"), waiting: most("waiting") });
    this.loads.splice(0, this.loads.length - MOST_LOADS);
    return restarted;
  }

  get median() {
    const times = this.steps.slice(-100).map((step) => step.measured ?? step.predicted).sort((a, b) => a - b);
    return times.length ? times[times.length >> 1] : null;
  }
}
