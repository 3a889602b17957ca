// The connection to the server: the key, requests, events merged into one state, and how numbers are written.

const KEY = "octavo-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

let ahead = 0; // seconds by which the server's clock is ahead of this one's

/** The time on the server's clock, in seconds. */
export const now = () => Date.now() / 1000 + ahead;

/** A request with the key. Throws an Error with the server's own sentence, and `status`. */
export async function call(method, path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!reply.ok) {
    const said = await reply.json().catch(() => null);
    const error = new Error(said?.error?.message || `The server answered with status ${reply.status}.`);
    error.status = reply.status;
    throw error;
  }
  return reply;
}

/** The events of a stream, as [name, data]. */
export async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      let name = "message";
      let data = null;
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data = line.slice(6);
      }
      if (data !== null) yield [name, data];
    }
  }
}

/** Takes up what has changed: objects field by field, null removes. */
export function merge(state, changes) {
  for (const [name, value] of Object.entries(changes)) {
    const old = state[name];
    if (value === null) delete state[name];
    else if (isObject(value) && isObject(old)) merge(old, value);
    else state[name] = value;
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/**
 * Follows the engines for as long as the page is open.
 * `onState(state, changes)` is called with all that is known and what is new in it; `onStatus(word)` with
 * connecting, live, lost, or key: the server wants one, or another one.
 */
export async function follow(onState, onStatus) {
  for (;;) {
    onStatus("connecting");
    try {
      const reply = await call("GET", "/dashboard/events");
      const theirs = Date.parse(reply.headers.get("date")) / 1000;
      if (Math.abs(theirs - Date.now() / 1000) > 2) ahead = theirs - Date.now() / 1000; // it is told in whole seconds
      const state = {};
      for await (const [name, data] of eventsOf(reply)) {
        if (name !== "state") break;
        const changes = JSON.parse(data);
        merge(state, changes);
        onStatus("live");
        onState(state, changes);
      }
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        onStatus("key");
        await askForKey(error.message);
        continue;
      }
    }
    onStatus("lost");
    await new Promise((done) => setTimeout(done, 1500));
  }
}

const STATUS = { connecting: "Connecting", live: "Live", lost: "Not connected; trying again", key: "Needs a key" };

/** Shows the state of the connection in the page's header. */
export function showStatus(word) {
  const element = document.getElementById("status");
  if (element.dataset.is === word) return;
  element.dataset.is = word;
  element.textContent = STATUS[word];
}

// What every page may ask.
document.body.insertAdjacentHTML("beforeend", `
  <dialog id="key-dialog" aria-labelledby="key-title">
    <form>
      <h2 id="key-title">The server wants a key</h2>
      <p class="soft" data-reason></p>
      <label>API key<input type="password" autocomplete="off" spellcheck="false" required></label>
      <p class="soft">It is kept until this tab is closed. You see what is kept of this key alone.</p>
      <div class="buttons"><button class="main">Go on</button></div>
    </form>
  </dialog>
  <dialog id="confirm-dialog" aria-labelledby="confirm-title">
    <form method="dialog">
      <h2 id="confirm-title"></h2>
      <p></p>
      <div class="buttons">
        <button value="no">Cancel</button>
        <button value="yes" class="main"></button>
      </div>
    </form>
  </dialog>`);

/** Asks for the key in a dialog; done when one was given. */
export function askForKey(reason) {
  const dialog = document.getElementById("key-dialog");
  dialog.querySelector("[data-reason]").textContent = reason;
  const input = dialog.querySelector("input");
  input.value = "";
  return new Promise((done) => {
    const submit = (event) => {
      event.preventDefault();
      if (!input.value.trim()) return;
      key.set(input.value.trim());
      dialog.close();
      dialog.removeEventListener("submit", submit);
      done();
    };
    dialog.addEventListener("submit", submit);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
}

/** Asks before something that cannot be undone; whether it is to be done. */
export function confirmed(title, text, action) {
  const dialog = document.getElementById("confirm-dialog");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("p").textContent = text;
  dialog.querySelector(".main").textContent = action;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}

export function bytes(number) {
  if (number < 1024) return `${number} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = number;
  let unit = -1;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export const many = (number, one, more) => `${count(number)} ${number === 1 ? one : more || `${one}s`}`;

export function seconds(number) {
  if (number < 0.0995) return `${(1000 * number).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 10) return `${number.toFixed(2)} s`;
  return `${number.toFixed(1)} s`;
}

export function ago(number) {
  const since = Math.max(0, number);
  if (since < 2) return "just now";
  if (since < 90) return `${Math.round(since)} s ago`;
  if (since < 5400) return `${Math.round(since / 60)} min ago`;
  return `${Math.round(since / 3600)} h ago`;
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "less than 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export const clock = (ended) => new Date(1000 * ended).toLocaleTimeString("en-GB");

/** The colour of a conversation: a class name. */
export const hue = (name) => (name ? `hue${Number(name.slice(1)) % 8}` : "nobody");

/** An element with a class, and text or children. */
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}
