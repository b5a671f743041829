"use strict";

const $ = id => document.getElementById(id);
const WHO = {draft: "drafted by the small model", correction: "correction by the large model", bonus: "bonus"};
let models = [], running = null;

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

function headers() {
  const key = $("key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

async function failure(response) {
  if (response.status === 401) {
    $("key-field").hidden = false;
    $("settings").open = true;
  }
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

async function loadModels() {
  const response = await fetch("v1/models", {headers: headers()});
  if (!response.ok) throw await failure(response);
  models = (await response.json()).data;
  $("model").replaceChildren(...models.map(model => new Option(model.id)));
  $("model-field").hidden = models.length < 2;
  showModel();
}

const adaptive = model => model.block_size === "adaptive";
const blockField = () => adaptive(chosen()) ? "max_block_size" : "block_size";
const chosen = () => models.find(one => one.id === $("model").value);

function showModel() {
  const model = chosen();
  $("method").replaceChildren(...model.methods.filter(one => one !== "verifier").map(one => new Option(one)));
  $("method").value = model.method;
  $("alpha").value = [model.alpha].flat().at(-1);
  $("block").value = adaptive(model) ? model.max_block_size : [model.block_size].flat().at(-1);
  $("block").max = $("block").value;
  $("block").disabled = Array.isArray(model.block_size);
  $("temperature").value = model.temperature;
  $("verifier-section").hidden = !model.methods.includes("verifier");
  if (!$("prompt").value) $("prompt").value = model.examples[0] ?? "";
}

/* One text, as the server writes it. `origin` colours each token by who wrote it. */
async function decode(name, more, signal) {
  const text = $(`${name}-text`), figures = $(`${name}-figures`), began = performance.now();
  let first = null, usage = null;
  text.replaceChildren();
  figures.replaceChildren();
  const body = {
    model: $("model").value, prompt: $("prompt").value, temperature: Number($("temperature").value),
    seed: Number($("seed").value), stream: true, stream_options: {include_usage: true}, origin: true, ...more};
  const response = await fetch("v1/completions", {method: "POST", headers: headers(), body: JSON.stringify(body), signal});
  if (!response.ok) throw await failure(response);
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    first ??= performance.now() - began;
    usage = event.usage ?? usage;
    for (const piece of event.choices[0]?.origin ?? []) {
      if (!piece.text) continue;
      const last = text.lastElementChild;
      if (last && last.className === (WHO[piece.origin] ? piece.origin : "")) {  // a word is one span, not three
        last.textContent += piece.text;
        continue;
      }
      const own = document.createElement("span");
      own.textContent = piece.text;
      if (WHO[piece.origin]) {
        own.className = piece.origin;
        own.title = WHO[piece.origin];
      }
      text.append(own);
    }
  }
  const whole = performance.now() - began;
  show(figures, usage, first, whole);
  return whole;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function show(list, usage, first, whole) {
  const rows = [["Tokens", usage.completion_tokens], ["Verifier calls", usage.verifier_calls]];
  if (usage.verifier_calls) rows.push(["Tokens per call", (usage.completion_tokens / usage.verifier_calls).toFixed(2)]);
  if (usage.drafted) {
    rows.push(["Accepted", `${usage.accepted} of ${usage.drafted} drafted`]);
    rows.push(["Deferred", `${Math.round(100 * usage.deferred / usage.drafted)}%`]);
  }
  rows.push(["First token", `${Math.round(first)} ms`], ["Total", `${Math.round(whole)} ms`]);
  for (const [name, value] of rows) {
    const term = document.createElement("dt"), own = document.createElement("dd");
    term.textContent = name;
    own.textContent = value;
    list.append(term, own);
  }
}

/* How the two times, in milliseconds, compare; null where there is no verifier. */
function compared(cascade, verifier) {
  if (verifier === null) return "Done.";
  return `Done: the cascade was ${(verifier / cascade).toFixed(2)} times as fast as the verifier alone.`;
}

async function run() {
  running?.abort();
  const own = running = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  say("Decoding.");
  try {
    const cascade = () => decode("cascade", {
      method: $("method").value, alpha: Number($("alpha").value),
      ...($("block").disabled ? {} : {[blockField()]: Number($("block").value)})}, own.signal);
    const verifier = () => $("verifier-section").hidden ? null : decode("verifier", {speculative: false}, own.signal);
    $("verifier-text").replaceChildren();
    $("verifier-figures").replaceChildren();
    const times = $("together").checked
      ? await Promise.all([cascade(), verifier()])
      : [await cascade(), await verifier()];
    say(compared(...times));
  } catch (error) {
    own.abort();
    say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  } finally {
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", async event => {
  event.preventDefault();
  try {
    if (!models.length) await loadModels();
    await run();
  } catch (error) {
    say(error.message, true);
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("model").addEventListener("change", showModel);
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("settings").open = !matchMedia("(max-width: 40rem)").matches;  // the results stay in sight
loadModels().catch(error => say(error.message, true));
