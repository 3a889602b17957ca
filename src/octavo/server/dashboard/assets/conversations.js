// The conversations: what each has in memory, what its turns reused and why not more, pinning and dropping.

import * as live from "./live.js";

const { bytes, count, make, many, seconds } = live;

const COLUMNS = [
  ["Ended", "Ended"],
  ["Prompt", "Tokens of the prompt"],
  ["Reused", "Tokens of the prompt that were reused"],
  ["Computed", "Tokens of the prompt that were computed"],
  ["First", "Time to the first token"],
  ["Speed", "Tokens a second"],
];

export class Conversations {
  /** `act(method, path)` asks the server to do something. */
  constructor(list, blocks, act) {
    this.list = list;
    this.blocks = blocks;
    this.act = act;
    this.rows = new Map();
  }

  show(known, mayAct) {
    const { list, rows } = this;
    const names = Object.keys(known).sort((a, b) => known[b].used_s - known[a].used_s);
    for (const [name, row] of rows) {
      if (name in known) continue;
      row.item.remove();
      rows.delete(name);
      this.blocks.pick(null);
    }
    names.forEach((name, index) => {
      if (!rows.has(name)) rows.set(name, this.build(name));
      const row = rows.get(name);
      showOne(row, known[name], mayAct);
      if (list.children[index] !== row.item) list.insertBefore(row.item, list.children[index] || null);
    });
    this.showNamed();
  }

  /** The one that the address names, once it is here. */
  showNamed() {
    const name = location.hash.slice(1);
    if (this.named === name || !this.rows.has(name)) return;
    this.named = name;
    this.rows.get(name).details.open = true;
    this.rows.get(name).item.scrollIntoView({ block: "nearest" });
  }

  build(name) {
    const row = {
      name,
      cell: make("span"),
      bars: make("div", "turns"),
      pin: make("button", "plain"),
      drop: make("button", "plain", "Drop"),
      about: make("span", "about number"),
      body: make("tbody"),
    };
    const head = make("tr");
    for (const [text, long] of COLUMNS) {
      const cell = make("th", "", text);
      cell.scope = "col";
      cell.title = long;
      head.append(cell);
    }
    const table = make("div", "scroll", make("table", "", make("thead", "", head), row.body));
    table.tabIndex = 0;
    table.setAttribute("role", "region");
    table.setAttribute("aria-label", `Turns of ${name}`);
    row.details = make("details", "", make("summary", "", "Turns"), table);
    row.bars.setAttribute("role", "img");
    row.pin.type = row.drop.type = "button";
    row.drop.setAttribute("aria-label", `Drop ${name}`);
    const does = make("span", "does", row.pin, row.drop);
    row.item = make(
      "li",
      "conversation",
      make("div", "line", row.cell, make("strong", "", name), row.bars, does),
      row.about,
      row.details,
    );
    row.item.id = name;
    for (const [event, whom] of [["mouseenter", name], ["mouseleave", null], ["focusin", name], ["focusout", null]]) {
      row.item.addEventListener(event, () => this.blocks.pick(whom));
    }
    row.pin.addEventListener("click", () => this.act(row.pinned ? "DELETE" : "PUT", `conversations/${name}/pin`));
    row.drop.addEventListener("click", async () => {
      const text = "Its keys and values are forgotten, in memory and on disk, but those that other conversations have "
        + "too. The text stays with whoever has it; the next turn computes it again.";
      if (await live.confirmed(`Drop ${name}?`, text, "Drop")) this.act("DELETE", `conversations/${name}`);
    });
    return row;
  }
}

function showOne(row, one, mayAct) {
  row.pinned = one.is_pinned;
  row.pin.textContent = one.is_pinned ? "Unpin" : "Pin";
  row.pin.setAttribute("aria-label", `${row.pin.textContent} ${row.name}`);
  row.pin.disabled = row.drop.disabled = !mayAct;
  row.cell.className = `cell ${one.is_pinned ? "pinned" : "reusable"} ${live.hue(row.name)}`;
  row.about.textContent = [
    one.num_running ? "answering" : null,
    many(one.num_turns, "turn"),
    `${many(one.num_blocks, "block")}${one.num_shared_blocks ? `, ${count(one.num_shared_blocks)} shared` : ""}`,
    bytes(one.num_bytes),
  ].filter(Boolean).join(" · ");
  row.details.hidden = row.bars.hidden = !one.turns.length;
  showBars(row.bars, one.turns);
  row.body.replaceChildren(...[...one.turns].reverse().flatMap(linesOf));
}

const computedOf = (turn) => turn.prompt_tokens - turn.cached_tokens;

/** A bar for each turn, as high as its prompt is long: what was reused, and on top of it what was computed. */
function showBars(bars, turns) {
  const most = Math.max(...turns.map((turn) => turn.prompt_tokens));
  bars.replaceChildren(
    ...turns.map((turn) => {
      const bar = make("span", "", make("i", "reused"), make("i"));
      bar.children[0].style.height = `${(100 * turn.cached_tokens) / most}%`;
      bar.children[1].style.height = `${(100 * computedOf(turn)) / most}%`;
      bar.title = `${count(turn.cached_tokens)} of ${count(turn.prompt_tokens)} tokens reused`;
      return bar;
    }),
  );
  const said = turns.map((turn) => `${turn.cached_tokens} and ${computedOf(turn)}`).join(", ");
  bars.setAttribute("aria-label", `Reused and computed tokens a turn: ${said}`);
}

/** The table's lines of a turn: its figures, and why not more was reused. */
function linesOf(turn) {
  const figures = [
    live.clock(turn.ended_s),
    count(turn.prompt_tokens),
    count(turn.cached_tokens) + (turn.loaded_tokens ? ` (${count(turn.loaded_tokens)} from disk)` : ""),
    count(computedOf(turn)),
    seconds(turn.ttft_s),
    turn.tokens_per_s ? `${count(turn.tokens_per_s)}/s` : "–",
  ];
  const lines = [make("tr", "", ...figures.map((text) => make("td", "", text)))];
  if (turn.why) {
    const { message, cost_s: cost, difference } = turn.why;
    const why = make("td", "why", message + (cost >= 0.001 ? ` It cost about ${seconds(cost)}.` : ""));
    if (difference) {
      const parts = [["earlier", difference.earlier], ["now", difference.now]];
      for (const [when, text] of parts) {
        const told = make("code", "", `…${shown(difference.before)}`, make("mark", "", shown(text)), "…");
        why.append(make("div", "difference", make("span", "", when), told));
      }
    }
    why.colSpan = figures.length;
    lines.push(make("tr", "", why));
  }
  return lines;
}

/** Text on one line. */
const shown = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"');
