// The block map: every block a cell, which hovering or the arrow keys tell about.

import { ago, bytes, hue, make, many, now } from "./live.js";

const [ID, KIND, STATE, HOLDERS, NAMES, POSITION, TOKENS, USED] = [0, 1, 2, 3, 4, 5, 6, 7];
const MAX_FREE = 256;
const STATES = { used: "in use", pinned: "pinned", reusable: "reusable" };

export class BlockMap {
  constructor(element, tip) {
    this.element = element;
    this.tip = tip;
    this.rows = [];
    this.picked = null;
    this.active = null;
    element.addEventListener("mouseover", (event) => this.activate(event.target.closest(".cell")));
    element.addEventListener("mouseleave", () => this.activate(null));
    element.addEventListener("focus", () => this.activate(this.active || element.firstElementChild));
    element.addEventListener("blur", () => this.activate(null));
    element.addEventListener("keydown", (event) => this.press(event));
  }

  /** Draws the cells; those that have not changed are left as they are. */
  show({ cells, model, memory }, whole) {
    this.model = model;
    this.memory = memory;
    const rows = withFree(cells.rows, whole && !cells.num_more, model.num_blocks);
    const { element } = this;
    while (element.children.length > rows.length) element.lastChild.remove();
    const added = [];
    while (element.children.length + added.length < rows.length) added.push(make("span", "cell"));
    element.append(...added);
    rows.forEach((row, index) => {
      const text = JSON.stringify(row);
      const cell = element.children[index];
      if (cell.dataset.row === text) return;
      cell.dataset.row = text;
      cell.id = `cell-${index}`;
      cell.className = this.classOf(row);
      cell.classList.toggle("first", row[KIND] === "open" && rows[index - 1]?.[KIND] === "sealed");
      cell.setAttribute("role", "option");
      cell.setAttribute("aria-selected", "false");
      cell.setAttribute("aria-label", this.describe(row).join(". "));
    });
    this.rows = rows;
    this.pick(this.picked);
    if (this.active && !this.active.isConnected) this.activate(null);
    else if (this.active) this.activate(this.active);
  }

  /** Draws nothing. */
  empty() {
    this.activate(null);
    this.rows = [];
    this.element.replaceChildren();
  }

  /** Makes the blocks of one conversation stand out. */
  pick(name) {
    this.picked = name;
    this.element.classList.toggle("picked", name !== null);
    this.rows.forEach((row, index) => {
      this.element.children[index].classList.toggle("mine", name !== null && row[NAMES].includes(name));
    });
  }

  classOf(row) {
    if (row[STATE] === "free") return "cell free";
    const shared = row[NAMES].length > 1 ? " shared" : "";
    const fill = row[KIND] === "open" ? ` open fill${Math.ceil((8 * row[TOKENS]) / this.model.block_tokens)}` : "";
    return `cell ${row[STATE]} ${hue(row[NAMES][0])}${shared}${fill}`;
  }

  /** What is to be said of a cell, in sentences. */
  describe(row) {
    if (row[STATE] === "free") return [`Block ${row[ID]}`, "free"];
    const sealed = row[KIND] === "sealed";
    const end = row[POSITION] === null ? null : row[POSITION] + row[TOKENS] - 1;
    return [
      `${sealed ? "Block" : "Open block"} ${row[ID]}: ${STATES[row[STATE]]}`,
      row[NAMES].length ? `of ${row[NAMES].join(", ")}` : "of no conversation that is listed",
      end === null ? null : `tokens ${row[POSITION]} to ${end}`,
      sealed ? `sealed in ${this.memory.kv_format}` : `open, raw in ${this.model.dtype}`,
      bytes(sealed ? this.model.block_bytes : this.model.slot_bytes),
      row[HOLDERS] ? `held by ${many(row[HOLDERS], "sequence")}` : null,
      row[NAMES].length > 1 ? `shared by ${row[NAMES].length} conversations` : null,
      row[USED] === null ? null : `used ${ago(now() - row[USED])}`,
    ].filter(Boolean);
  }

  activate(cell) {
    if (this.active) {
      this.active.classList.remove("active");
      this.active.setAttribute("aria-selected", "false");
    }
    this.active = cell;
    this.tip.hidden = !cell;
    if (!cell) {
      this.element.removeAttribute("aria-activedescendant");
      return;
    }
    cell.classList.add("active");
    cell.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", cell.id);
    const [title, ...rest] = this.describe(JSON.parse(cell.dataset.row));
    cell.setAttribute("aria-label", [title, ...rest].join(". "));
    this.tip.replaceChildren(make("b", "", title), ...rest.map((line) => make("div", "", line)));
    const around = this.element.offsetParent.getBoundingClientRect();
    const box = cell.getBoundingClientRect();
    const left = Math.min(box.left - around.left, around.width - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${box.bottom - around.top + 7}px`;
  }

  press(event) {
    const cells = [...this.element.children];
    if (!cells.length) return;
    const index = Math.max(0, cells.indexOf(this.active));
    const columns = Math.max(1, cells.findIndex((cell) => cell.offsetTop > cells[0].offsetTop)) || cells.length;
    const to = {
      ArrowRight: index + 1,
      ArrowLeft: index - 1,
      ArrowDown: index + columns,
      ArrowUp: index - columns,
      Home: 0,
      End: cells.length - 1,
    }[event.key];
    if (event.key === "Escape") this.activate(null);
    if (to === undefined) return;
    event.preventDefault();
    const next = cells[Math.min(cells.length - 1, Math.max(0, to))];
    next.scrollIntoView({ block: "nearest" });
    this.activate(next);
  }
}

/** Sealed blocks in the order of their ids, with those that are free between them; open ones behind. */
function withFree(rows, shown, numBlocks) {
  const sealed = rows.filter((row) => row[KIND] === "sealed");
  const open = rows.filter((row) => row[KIND] === "open");
  if (!shown || !rows.length) return [...sealed, ...open];
  const byId = new Map(sealed.map((row) => [row[ID], row]));
  const last = sealed.length ? sealed.at(-1)[ID] : -1;
  const end = Math.min(numBlocks, last + 1 + Math.min(MAX_FREE, 24));
  const all = [];
  for (let id = 0; id < end; id += 1) all.push(byId.get(id) || [id, "sealed", "free", 0, [], null, 0, null]);
  return [...all, ...open];
}
