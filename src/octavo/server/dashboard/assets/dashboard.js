// The dashboard: memory, figures and events. Blocks are in map.js, conversations and charts in modules of their names.

import { Charts } from "./charts.js";
import { Conversations } from "./conversations.js";
import * as live from "./live.js";
import { BlockMap } from "./map.js";

const { bytes, count, make, many, percent, seconds } = live;
const at = (id) => document.getElementById(id);

let state = {};
let chosen = null;
let before = null; // counts and conversations of the last event, to tell what has happened since

const blocks = new BlockMap(at("map"), at("tip"));
const charts = new Charts();
const conversations = new Conversations(at("conversations"), blocks, act);

live.follow((all, changes) => {
  state = all;
  chooseModel(all);
  show(changes);
}, live.showStatus);

function chooseModel({ models }) {
  const names = Object.keys(models);
  if (!(chosen in models)) {
    if (chosen && names.length) beginAnew();
    chosen = names[0];
  }
  const select = at("model");
  select.hidden = names.length < 2;
  at("model-name").hidden = names.length > 1;
  at("model-name").textContent = chosen;
  if ([...select.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
  select.value = chosen ?? "";
}

/** Another model is shown from now on. */
function beginAnew() {
  before = null;
  charts.reset();
  at("events").replaceChildren();
}

at("model").addEventListener("change", (event) => {
  chosen = event.target.value;
  beginAnew();
  show(null);
});

function show(changes) {
  const seen = state.models[chosen];
  if (!seen) {
    showNothing();
    return;
  }
  const news = changes === null || changes.who ? seen : changes.models?.[chosen];
  if (!news) return;
  tellEvents(seen);
  showFigures(seen);
  charts.add(seen);
  if (news.memory || news.model) showMemory(seen, state.who.whole);
  if (news.cells || news.memory) {
    blocks.show(seen, state.who.whole);
    const { rows, num_more: more } = seen.cells;
    at("blocks-sum").textContent =
      `${many(rows.length + more, "block")} of ${seen.model.block_tokens} tokens` +
      (more ? `, the ${count(rows.length)} used last are shown` : "");
    at("map-empty").hidden = rows.length > 0;
    at("clear").disabled = !state.who.may_act || rows.length === 0;
  }
  if (news.conversations) {
    conversations.show(seen.conversations, state.who.may_act);
    at("conversations-empty").hidden = Object.keys(seen.conversations).length > 0;
  }
  before = { counts: { ...seen.counts }, turns: turnsOf(seen), cells: seen.cells.rows.length };
}

/** No model is loaded: it was idle for long, or there was no room beside another. */
function showNothing() {
  at("model-name").textContent = "no model is loaded";
  blocks.empty();
  charts.reset();
  conversations.show({}, false);
  for (const id of ["memory-bar", "memory-legend", "figures"]) at(id).replaceChildren();
  at("memory-sum").textContent = at("blocks-sum").textContent = "";
  at("map-empty").hidden = at("conversations-empty").hidden = false;
  at("clear").disabled = true;
  before = { counts: { evicted_blocks: 0, restored_blocks: 0 }, turns: {}, cells: 0 }; // what it begins with again
}

// Memory

function showMemory({ memory }, whole) {
  const free = memory.kv_budget_bytes - memory.kv_used_bytes - memory.kv_reusable_bytes;
  const parts = [
    ["weights", `weights (${memory.weights})`, memory.weights_bytes],
    ["used", `KV in use`, memory.kv_used_bytes],
    ["reusable", `KV reusable`, memory.kv_reusable_bytes],
    ["workspace", "workspace", memory.workspace_bytes],
    ["free", whole ? "free for KV" : "free, or held by others", free],
  ].filter(([, , number]) => number !== undefined);
  const total = parts.reduce((sum, [, , number]) => sum + number, 0);
  drawBar(at("memory-bar"), parts);
  at("memory-legend").replaceChildren(
    ...parts.map(([of, label, number]) =>
      make("li", "", make("span", `swatch of-${of}`), `${label} `, make("b", "number", bytes(number))),
    ),
  );
  at("memory-sum").textContent =
    `${bytes(total - free)} of ${bytes(total)} · the cache may take ${bytes(memory.kv_budget_bytes)} · ` +
    `${count(memory.kv_bytes_per_token)} B a token in ${memory.kv_format}`;
  const { disk } = memory;
  at("disk").hidden = disk.state === "off";
  if (disk.state === "on" && !whole) {
    at("disk-sum").textContent = `up to ${bytes(disk.budget_bytes)}; what is yours of it is not counted apart`;
  } else if (disk.state === "on") {
    at("disk-sum").textContent =
      `${bytes(disk.used_bytes)} of ${bytes(disk.budget_bytes)} · ${many(disk.num_written, "block")} written, ` +
      `${count(disk.num_loaded)} loaded`;
  } else {
    at("disk-sum").textContent = `not in use: ${disk.reason}`;
  }
  at("disk-bar").hidden = disk.state !== "on" || !whole;
  drawBar(at("disk-bar"), [
    ["reusable", "used", disk.used_bytes],
    ["free", "free", Math.max(0, disk.budget_bytes - disk.used_bytes)],
  ]);
}

function drawBar(bar, parts) {
  if (bar.children.length !== parts.length) bar.replaceChildren(...parts.map(([of]) => make("span", `of-${of}`)));
  parts.forEach(([of, label, number], index) => {
    const part = bar.children[index];
    part.className = `of-${of}${number ? " some" : ""}`;
    part.style.flexGrow = number;
    part.title = `${label}: ${bytes(number)}`;
  });
  bar.setAttribute("aria-label", parts.map(([, label, number]) => `${label} ${bytes(number)}`).join(", "));
}

// Figures

function showFigures(seen) {
  const { counts } = seen;
  const turns = lastTurns(seen.conversations, 20);
  const firsts = turns.map((turn) => turn.ttft_s).sort((a, b) => a - b);
  const last = turns.at(-1);
  const share = counts.prompt_tokens ? counts.cached_tokens / counts.prompt_tokens : 0;
  figures([
    ["Reused", counts.prompt_tokens ? percent(share) : "–", `of ${many(counts.prompt_tokens, "prompt token")}`],
    [
      "First token",
      firsts.length ? seconds(firsts[Math.floor(firsts.length / 2)]) : "–",
      firsts.length ? `median of the last ${firsts.length}` : "no answers yet",
    ],
    [
      "Speed",
      last?.tokens_per_s ? `${count(last.tokens_per_s)}/s` : "–",
      last ? "tokens, last answer" : "no answers yet",
    ],
    ["Answering", count(counts.running), `${count(counts.waiting)} waiting`],
    ["Evicted", count(counts.evicted_blocks), "blocks, to make room"],
    ["Restored", count(counts.restored_blocks), "blocks, from disk"],
  ]);
}

function figures(items) {
  const list = at("figures");
  if (!list.children.length) {
    list.append(...items.map(() => make("div", "", make("dt"), make("dd", "", make("span"), make("small")))));
  }
  items.forEach(([name, value, note], index) => {
    const [term, figure] = list.children[index].children;
    term.textContent = name;
    figure.children[0].textContent = value;
    figure.children[1].textContent = note;
  });
}

function lastTurns(known, limit) {
  const turns = Object.values(known).flatMap((one) => one.turns);
  return turns.sort((a, b) => a.ended_s - b.ended_s).slice(-limit);
}

// Actions

async function act(method, path) {
  try {
    await live.call(method, `/dashboard/${path}?model=${encodeURIComponent(chosen)}`);
  } catch (error) {
    tell(live.now(), error.message, "notice");
  }
}

at("clear").addEventListener("click", async () => {
  const text = "All keys and values that are kept of you are forgotten, in memory and on disk. The model stays loaded, "
    + "and the text stays with whoever has it; the next turn computes it again.";
  if (await live.confirmed("Clear the cache?", text, "Clear")) act("DELETE", "cache");
});

// Events

function turnsOf(seen) {
  return Object.fromEntries(Object.entries(seen.conversations).map(([name, one]) => [name, one.num_turns]));
}

function tellEvents(seen) {
  if (!before) return;
  const now = live.now();
  for (const [name, one] of Object.entries(seen.conversations)) {
    const fresh = Math.min(one.turns.length, one.num_turns - (before.turns[name] || 0));
    for (const turn of fresh > 0 ? one.turns.slice(-fresh) : []) {
      tell(
        turn.ended_s,
        `${name} was answered: ${count(turn.cached_tokens)} of ${count(turn.prompt_tokens)} prompt tokens reused, ` +
          `first token after ${seconds(turn.ttft_s)}, ${many(turn.completion_tokens, "token")} generated`,
      );
    }
  }
  const evicted = seen.counts.evicted_blocks - before.counts.evicted_blocks;
  const restored = seen.counts.restored_blocks - before.counts.restored_blocks;
  if (evicted > 0) tell(now, `${many(evicted, "block")} evicted to make room`);
  if (restored > 0) tell(now, `${many(restored, "block")} restored from disk`);
  if (before.cells && !seen.cells.rows.length) tell(now, "The cache is empty: it was cleared, or all was dropped");
}

function tell(when, text, className = "") {
  const time = make("time", "", live.clock(when));
  at("events").prepend(make("li", className, time, make("span", "", text)));
  while (at("events").children.length > 60) at("events").lastChild.remove();
  at("events-empty").hidden = true;
}
