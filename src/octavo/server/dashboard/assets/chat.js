// The chat page: conversations held through /v1/chat/completions, each answer with what was reused and computed.

import * as live from "./live.js";
import { reportFrom, reportOf } from "./report.js";

const { bytes, make, many } = live;
const at = (id) => document.getElementById(id);
const STORE = "octavo-chats";

// A chat is a system prompt and turns, {question, answer, report, failed}; `from` names the one it was forked from,
// and `conversations` are the server's names of all that it has been, turns that were dropped included.
let { chats, chat } = load();
let models = {};
let names = []; // of models that can be asked, loaded or not
let running = null; // {controller, chat}

live.follow((state) => {
  models = state.models;
  names = state.who.names;
  chooseModels();
  showShare();
}, live.showStatus);

// Kept in the tab, until it is closed

function load() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(STORE));
    const shown = kept.chats.find((one) => one.number === kept.shown);
    if (shown) return { chats: kept.chats, chat: shown };
  } catch {
    // Nothing is kept, or it cannot be read.
  }
  const first = newChat(1);
  return { chats: [first], chat: first };
}

function save() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify({ chats, shown: chat.number }));
  } catch {
    // No room: the chats live for as long as the page does.
  }
}

function newChat(number, from = null) {
  return { number, from, system: "", turns: [], conversations: [] };
}

const nextNumber = () => Math.max(...chats.map((one) => one.number)) + 1;

function chooseModels() {
  const select = at("model");
  select.hidden = names.length < 2;
  at("model-name").hidden = names.length > 1;
  at("model-name").textContent = names[0] || "";
  if ([...select.options].map((one) => one.value).join() !== names.join()) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
}

const model = () => at("model").value || names[0];

// Drawing

function show() {
  at("system").value = chat.system;
  at("branch-list").replaceChildren(...chats.map(branchItem));
  at("turns").replaceChildren(...chat.turns.map((turn, index) => turnItem(turn, index)));
  at("hint").hidden = chat.turns.length > 0;
  at("clear").disabled = !chat.turns.length;
  showBusy();
  showShare();
}

function showBusy() {
  const busy = running !== null;
  at("send").textContent = busy ? "Stop" : "Send";
  at("message").required = !busy;
  for (const button of document.querySelectorAll(".turn button, #new, #branch-list button, #clear")) {
    button.disabled = busy || (button.id === "clear" && !chat.turns.length);
  }
}

const titleOf = (one) => one.turns[0]?.question || "Nothing asked yet";

function branchItem(one) {
  const note = `Chat ${one.number}${one.from ? `, forked from ${one.from}` : ""}`;
  const button = make("button", "", titleOf(one), make("small", "", note));
  button.type = "button";
  button.title = titleOf(one);
  if (one === chat) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => {
    chat = one;
    save();
    show();
    at("message").focus();
  });
  return make("li", "", button);
}

function turnItem(turn, index) {
  const item = make("li", "turn");
  item.dataset.index = index;
  const question = make("div", "question", make("div", "text", turn.question));
  const edit = action("Edit", `Edit question ${index + 1}`, () => editTurn(item, index));
  const text = make("div", "text", turn.answer);
  text.dataset.waits = turn.failed || turn.report ? "(no text)" : "Reading the prompt …";
  const answer = make("div", "answer", text);
  if (turn.failed) answer.append(make("p", "notice", turn.failed));
  if (turn.report) answer.append(reportOf(turn.report));
  if (turn.report || turn.failed) {
    const does = make("div", "does");
    does.append(
      action("Fork", `Fork the chat after answer ${index + 1}`, () => fork(index)),
      action("Rewind to here", `Drop everything after answer ${index + 1}`, () => rewind(index)),
      action("Ask again", `Ask question ${index + 1} again`, () => ask(turn.question, index)),
    );
    if (index === chat.turns.length - 1) does.children[1].remove();
    answer.append(does);
  }
  item.append(question, make("div", "does question-does", edit), answer);
  return item;
}

function action(text, label, act) {
  const button = make("button", "plain", text);
  button.type = "button";
  button.disabled = running !== null;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

/** What of the shown chat is in memory now. */
function showShare() {
  const seen = models[model()];
  const one = seen?.conversations[chat.turns.findLast((turn) => turn.report)?.report.conversation];
  const share = one ? one.num_bytes / seen.memory.kv_budget_bytes : 0;
  at("share-meter").firstElementChild.style.flexBasis = `${Math.max(one ? 2 : 0, 100 * share)}%`;
  at("share-meter").setAttribute("aria-label", `Share of the cache: ${live.percent(share)}`);
  at("share-text").textContent = one?.num_bytes
    ? `${bytes(one.num_bytes)}, ${live.percent(share)} of the cache, in ${many(one.num_blocks, "block")}`
    : "Nothing of this chat is in memory.";
}

// Doing

function fork(index) {
  const other = newChat(nextNumber(), chat.number);
  other.system = chat.system;
  other.turns = structuredClone(chat.turns.slice(0, index + 1));
  chats.push(other);
  chat = other;
  save();
  show();
  at("message").focus();
}

function rewind(index) {
  chat.turns.length = index + 1;
  save();
  show();
  at("message").focus();
}

function editTurn(item, index) {
  const area = make("textarea");
  area.value = chat.turns[index].question;
  area.rows = 3;
  area.setAttribute("aria-label", `Question ${index + 1}`);
  const cancel = action("Cancel", "Cancel the edit", show);
  const send = make("button", "main", "Ask this instead");
  send.type = "button";
  const go = () => area.value.trim() && ask(area.value.trim(), index);
  send.addEventListener("click", go);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show();
    if (isEnter(event)) {
      event.preventDefault();
      go();
    }
  });
  item.querySelector(".question").replaceChildren(
    make("div", "edit", area, make("div", "does", cancel, send)),
  );
  item.querySelector(".question-does").remove();
  area.focus();
}

const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

/** Asks in place of turn `index`, whose followers go, or as a next turn. */
async function ask(question, index = chat.turns.length) {
  const asked = chat;
  asked.turns.length = Math.min(index, asked.turns.length);
  const turn = { question, answer: "", report: null, failed: null };
  asked.turns.push(turn);
  running = { controller: new AbortController(), chat: asked };
  show();
  const element = at("turns").lastElementChild.querySelector(".answer .text");
  toEnd();
  try {
    await generate(asked, turn, element, running.controller.signal);
  } catch (error) {
    turn.failed = error.name === "AbortError" ? "You stopped this answer." : error.message;
    if (error.status === 401) live.askForKey(error.message);
  }
  running = null;
  save();
  show();
  toEnd();
}

function toEnd() {
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

async function generate(asked, turn, element, signal) {
  const messages = asked.system.trim() ? [{ role: "system", content: asked.system }] : [];
  for (const one of asked.turns) {
    messages.push({ role: "user", content: one.question });
    if (one !== turn) messages.push({ role: "assistant", content: one.answer });
  }
  const body = {
    model: model(),
    messages,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
    octavo: { why: true },
  };
  const reply = await live.call("POST", "/v1/chat/completions", { body, signal });
  for await (const [, data] of live.eventsOf(reply)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const text = chunk.choices[0]?.delta.content;
    if (text) {
      turn.answer += text;
      element.append(text);
      followEnd();
    }
    if (chunk.octavo) {
      turn.report = reportFrom(chunk, models[model()]?.memory);
      asked.conversations.push(chunk.octavo.conversation);
    }
  }
  if (!turn.report) throw new Error("The connection ended before the answer did. Ask again.");
}

/** Keeps the end in sight for who is there already. */
function followEnd() {
  const page = document.documentElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 120) toEnd();
}

async function clear() {
  const cleared = chat; // another one may be shown by the time the server has answered
  const namesOf = (one) => [...one.conversations, ...one.turns.map((turn) => turn.report?.conversation)];
  const names = new Set(namesOf(cleared).filter(Boolean));
  const shared = new Set(chats.filter((one) => one !== cleared).flatMap(namesOf));
  const text = "Its text goes from this page, and its keys and values from the server, in memory and on disk. What "
    + "other conversations have too stays.";
  if (!(await live.confirmed("Clear this chat?", text, "Clear"))) return;
  for (const name of names) {
    if (shared.has(name)) continue;
    const path = `/dashboard/conversations/${name}?model=${encodeURIComponent(model())}`;
    await live.call("DELETE", path).catch(() => {}); // it may be forgotten already
  }
  if (chats.length > 1) {
    chats = chats.filter((one) => one !== cleared);
    if (chat === cleared) chat = chats.at(-1);
  } else {
    cleared.turns = [];
    cleared.conversations = [];
  }
  save();
  show();
  at("message").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.controller.abort();
    return;
  }
  const question = at("message").value.trim();
  if (!question) return;
  at("message").value = "";
  ask(question);
});
at("message").addEventListener("keydown", (event) => {
  if (!isEnter(event)) return;
  event.preventDefault();
  if (!running) at("ask").requestSubmit();
});
at("system").addEventListener("input", (event) => {
  chat.system = event.target.value;
  save();
});
at("model").addEventListener("change", showShare);
at("new").addEventListener("click", () => {
  chat = chats.find((one) => !one.turns.length) || newChat(nextNumber());
  if (!chats.includes(chat)) chats.push(chat);
  save();
  show();
  at("message").focus();
});
at("clear").addEventListener("click", clear);
show();
