// What changes over time, drawn by uPlot: of each answer, and of each moment that this page has seen.

import { bytes, count, make, now as serverNow, percent, seconds } from "./live.js";

const MIN_WINDOW_S = 90;
const MAX_WINDOW_S = 900;
const MAX_POINTS = 1500;

const CHARTS = {
  reuse: {
    title: "Reused of each prompt",
    write: percent,
    top: 1,
    series: [
      { label: "of one prompt", colour: "--reusable", points: true },
      { label: "of all so far", colour: "--used" },
    ],
  },
  first: {
    title: "Time to first token",
    write: (number) => (number ? seconds(number) : "0"),
    least: 0.01,
    series: [{ label: "of one answer", colour: "--used", points: true }],
  },
  speed: {
    title: "Generated",
    write: (number) => (number ? `${count(number)}/s` : "0"),
    least: 10,
    series: [{ label: "tokens a second, all answers", colour: "--used", filled: true }],
  },
  memory: {
    title: "KV cache",
    write: (number) => (number ? bytes(number) : "0"),
    least: 1 << 20,
    steps: Array.from({ length: 40 }, (_, power) => 2 ** power),
    series: [
      { label: "held", colour: "--reusable", filled: true },
      { label: "in use", colour: "--used", filled: true },
    ],
  },
};

export class Charts {
  constructor() {
    this.reset();
    for (const name of Object.keys(CHARTS)) this.build(name);
    new ResizeObserver(() => this.fit()).observe(document.querySelector(".charts"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const name of Object.keys(CHARTS)) this.build(name);
      this.draw();
    });
    setInterval(() => this.tick(), 1000);
  }

  /** Begins anew, for another model. */
  reset() {
    this.data = { reuse: [[], [], []], first: [[], []], speed: [[], []], memory: [[], [], []] };
    this.known = new Set();
    this.reused = this.prompted = 0;
    this.last = this.generated = null;
  }

  /** Takes up what an engine holds and has done. */
  add({ counts, conversations, memory }) {
    // The engine has begun anew: what it did before does not go with what it does now.
    if (this.last && counts.num_requests < this.last.counts.num_requests) this.reset();
    const turns = Object.values(conversations).flatMap((one) => one.turns);
    turns.sort((a, b) => a.ended_s - b.ended_s);
    const known = this.known;
    this.known = new Set(turns.map((turn) => turn.request_id));
    for (const turn of turns) {
      if (known.has(turn.request_id)) continue;
      this.reused += turn.cached_tokens;
      this.prompted += turn.prompt_tokens;
      push(this.data.reuse, turn.ended_s, turn.cached_tokens / turn.prompt_tokens, this.reused / this.prompted);
      push(this.data.first, turn.ended_s, turn.ttft_s);
    }
    const now = serverNow();
    this.last = { counts, memory };
    push(this.data.memory, now, memory.kv_used_bytes + memory.kv_reusable_bytes, memory.kv_used_bytes);
    this.rate(now, counts.generated_tokens);
    this.draw();
  }

  /** A second has passed, in which nothing need have happened. */
  tick() {
    if (!this.last) return;
    const now = serverNow();
    const { counts, memory } = this.last;
    push(this.data.memory, now, memory.kv_used_bytes + memory.kv_reusable_bytes, memory.kv_used_bytes);
    this.rate(now, counts.generated_tokens);
    this.draw();
  }

  rate(now, total) {
    if (this.generated === null) this.generated = { now, total };
    const passed = now - this.generated.now;
    if (passed < 0.9) return;
    push(this.data.speed, now, Math.max(0, total - this.generated.total) / passed);
    this.generated = { now, total };
  }

  build(name) {
    const { title, series, write, top, least, steps } = CHARTS[name];
    const figure = document.getElementById(`chart-${name}`);
    figure.replaceChildren();
    const style = getComputedStyle(document.documentElement);
    const colour = (variable) => style.getPropertyValue(variable).trim();
    const now = make("span", "now number");
    const keys = series.map((one) => {
      const line = make("i");
      line.style.background = colour(one.colour);
      return make("span", "key", line, one.label);
    });
    const plot = make("div");
    plot.setAttribute("role", "img");
    figure.append(make("figcaption", "", make("h3", "", title), ...keys, now), plot);
    const axis = { stroke: colour("--soft"), font: `12px ${colour("--sans")}`, ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    const options = {
      width: 300,
      height: 150,
      legend: { show: false },
      cursor: { y: false, points: { size: 7 } },
      padding: [8, 8, 0, 0],
      scales: {
        x: { range: () => this.span() },
        y: { range: (_, low, high) => [0, top || Math.max(high * 1.15, least)] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 70, values: (_, times) => times.map(moment) },
        { ...axis, grid, size: 62, space: 34, ...(steps && { incrs: steps }), values: (_, values) => values.map((v) => (v === null ? "" : write(v))) },
      ],
      series: [
        {},
        ...series.map((one) => ({
          stroke: colour(one.colour),
          fill: one.filled ? `color-mix(in srgb, ${colour(one.colour)} 22%, transparent)` : undefined,
          width: one.points ? 0 : 2,
          points: { show: Boolean(one.points), size: 6, fill: colour(one.colour), stroke: colour(one.colour) },
        })),
      ],
      hooks: { setCursor: [(chart) => this.tell(name, chart.cursor.idx)] },
    };
    this.plots ??= {};
    this.plots[name] = { chart: new uPlot(options, this.data[name], plot), plot, now };
    this.fit();
  }

  /** The time that is shown: from the first answer or look on, but neither too little nor too much. */
  span() {
    const now = serverNow();
    const first = Math.min(this.data.reuse[0][0] ?? now, this.data.memory[0][0] ?? now);
    return [Math.min(now - MIN_WINDOW_S, Math.max(now - MAX_WINDOW_S, first - 2)), now];
  }

  fit() {
    for (const { chart, plot } of Object.values(this.plots)) {
      if (plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: 150 });
    }
  }

  draw() {
    for (const [name, { chart }] of Object.entries(this.plots)) {
      chart.setData(this.data[name]);
      if (chart.cursor.idx === null || chart.cursor.idx === undefined) this.tell(name, null);
    }
  }

  /** The value under the pointer, or the last one, in words. */
  tell(name, index) {
    if (!this.plots[name]) return;
    const { now, plot } = this.plots[name];
    const data = this.data[name];
    const at = index ?? data[0].length - 1;
    const values = at < 0 ? [] : data.slice(1).map((values) => CHARTS[name].write(values[at]));
    now.textContent = values.join(" · ");
    const said = CHARTS[name].series.map((one, i) => `${one.label} ${values[i]}`).join(", ");
    plot.setAttribute("aria-label", `${CHARTS[name].title}: ${values.length ? said : "nothing yet"}`);
  }
}

function push(data, ...values) {
  values.forEach((value, index) => data[index].push(value));
  if (data[0].length > MAX_POINTS) data.forEach((values) => values.splice(0, values.length - MAX_POINTS));
}

const moment = (time) =>
  new Date(1000 * time).toLocaleTimeString("en-GB", {
    hour: "2-digit",
    minute: "2-digit",
    ...(time % 60 ? { second: "2-digit" } : {}),
  });
