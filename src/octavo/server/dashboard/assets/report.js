// Below an answer: what of its prompt was reused and what was computed, how long it took, and what it adds to the cache.

import { bytes, count, make, many, percent, seconds } from "./live.js";

/** What is kept of an answer's report. `memory` is that of its model, if it is known. */
export function reportFrom({ usage, octavo }, memory) {
  const fresh = usage.total_tokens - octavo.cached_tokens;
  const decoding = octavo.total_s - octavo.ttft_s;
  return {
    prompt_tokens: usage.prompt_tokens,
    completion_tokens: usage.completion_tokens,
    cached_tokens: octavo.cached_tokens,
    ttft_s: octavo.ttft_s,
    tokens_per_s: usage.completion_tokens > 1 && decoding > 0 ? (usage.completion_tokens - 1) / decoding : 0,
    bytes: memory ? fresh * memory.kv_bytes_per_token : 0,
    budget: memory ? memory.kv_budget_bytes : 0,
    conversation: octavo.conversation,
    why: octavo.why ? octavo.why.message : null,
    notes: octavo.notes,
  };
}

/** What an answer took: reused and computed tokens, times, its share of memory, and why not more was reused. */
export function reportOf(report) {
  const computed = report.prompt_tokens - report.cached_tokens;
  const split = make("div", "split", make("span", "reused"), make("span", "computed"));
  split.children[0].style.flexGrow = report.cached_tokens;
  split.children[1].style.flexGrow = computed;
  split.setAttribute("role", "img");
  split.setAttribute("aria-label", `${count(report.cached_tokens)} tokens reused, ${count(computed)} computed`);
  const line = make("p", "number");
  const say = (strong, rest) => line.append(make("b", "", strong), rest);
  say(count(report.cached_tokens), ` of ${many(report.prompt_tokens, "prompt token")} reused, `);
  say(count(computed), " computed · first token ");
  say(seconds(report.ttft_s), " · ");
  if (report.tokens_per_s) say(`${count(report.tokens_per_s)}/s`, " · ");
  line.append(many(report.completion_tokens, "token"));
  const parts = [split, line];
  if (report.bytes) {
    const share = `adds ${bytes(report.bytes)} to the cache, ${percent(report.bytes / report.budget)} of its budget`;
    parts.push(make("p", "number", share, ...(report.conversation ? [" · ", linkTo(report.conversation)] : [])));
  }
  if (report.why) parts.push(make("p", "", report.why));
  for (const note of report.notes) parts.push(make("p", "", note));
  return make("div", "report", ...parts);
}

function linkTo(name) {
  const link = make("a", "", `conversation ${name}`);
  link.href = `/#${name}`;
  return link;
}
