/**
 * The page of a phone that takes part: consent, then what the device does, as its Worker tells. It computes nothing of the
 * promise itself; it listens to the sensor, and shows.
 *
 * @typedef {import("../device/worker.js").Told} Told
 * @typedef {import("../device/worker.js").Said} Said
 * @typedef {Extract<Said, { kind: "view" }>["view"]} View
 */

import { askForMotion, Motion } from "./motion.js";
import { drawSpectrum } from "./spectrum.js";
import { hasWord, say, shown, timeOf } from "./words.js";

/** Milliseconds until a server that did not answer is asked for a task again. */
const LATER = 3000;
/** Milliseconds between two pictures of the spectrum. */
const FRAME = 100;

/** @template {HTMLElement} T @param {string} id @param {new () => T} kind @returns {T} */
function part(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`The page has no ${id}.`);
  return found;
}

const root = part("phone", HTMLElement);
const live = part("phone-live", HTMLElement);
const canvas = part("phone-spectrum", HTMLCanvasElement);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** @type {View | null} */
let view = null;
/** The label that holds now, and how often the owner has chosen one. */
let label = -1;
let tap = 0;
/** What an undo brings back. @type {{ label: number, tap: number }[]} */
const taps = [];
/** @type {Worker | null} */
let worker = null;
/** Whether this page's owner said yes in it. */
let isJoining = false;

const motion = new Motion({
  window: (magnitudes) => {
    if (label >= 0 && view) tell({ kind: "window", task: view.task, magnitudes, y: label, tap });
    if (calm.matches) drawSpectrum(canvas, motion.cutter.recent);
  },
  changed: () => showSensing(),
});

/** @param {Told} told */
function tell(told) {
  worker?.postMessage(told, { transfer: [] });
}

// --- what this browser lacks ---

/** The name of a sentence for what keeps this browser from taking part; null: nothing does. @returns {Promise<string | null>} */
async function hindrance() {
  if (!isSecureContext || !globalThis.crypto?.subtle) return "insecure";
  if (!globalThis.indexedDB || !navigator.locks || typeof Worker === "undefined") return "old-browser";
  try {
    await crypto.subtle.generateKey({ name: "Ed25519" }, false, ["sign", "verify"]);
    return null;
  } catch {
    return "no-ed25519";
  }
}

// --- consent ---

/** @returns {HTMLButtonElement[]} */
function offers() {
  return [...document.querySelectorAll("button[data-join]")].filter((each) => each instanceof HTMLButtonElement);
}

for (const button of offers()) button.addEventListener("click", () => void join(button));

/** What a page shows while its browser takes part in nothing. */
function beginning() {
  return document.getElementById("phone-consent") ? "phone-consent" : "phone-none";
}

/** The one tap of consent: it asks for the sensor, too. @param {HTMLButtonElement} button */
async function join(button) {
  const { join: task = "", code = "", features } = button.dataset;
  if (features === "accelerometer-spectrum") {
    const state = await askForMotion();
    if (state !== "starting") {
      refuse(`sensing.${state}`);
      return;
    }
  }
  isJoining = true;
  for (const each of offers()) each.disabled = true;
  void persist();
  tell({ kind: "consent", task, code });
}

/** Ask the browser to keep what this device stores. @returns {Promise<void>} */
async function persist() {
  const kept = (await navigator.storage?.persist?.().catch(() => false)) ?? false;
  part("phone-kept", HTMLElement).textContent = say(kept ? "kept.yes" : "kept.no");
}

/** Show why nothing can be joined here. @param {string} name @param {string} [detail] */
function refuse(name, detail = "") {
  const notice = part("phone-refusal", HTMLElement);
  notice.textContent = hasWord(`cannot.${name}`)
    ? say(`cannot.${name}`)
    : hasWord(name)
    ? say(name)
    : say("cannot.other", { detail });
  notice.hidden = false;
}

/** @param {Extract<Said, { kind: "looked" }>} looked */
function judge({ task, why, detail, price }) {
  const button = offers().find((each) => each.dataset.join === task);
  if (!button) return;
  const { sample, device } = button.dataset;
  if (why === "unreachable") {
    setTimeout(() => tell({ kind: "look", task }), LATER);
    return;
  }
  if (why !== null) return refuse(why === "closed" ? why : "task", detail);
  if (price !== null && !(isNear(price.sample, Number(sample)) && isNear(price.device, Number(device)))) {
    return refuse("cannot.price");
  }
  button.disabled = false;
  root.dataset.ready = "yes";
}

/** Whether this browser computed what the page says, but for the last digits of floats. @param {number} own @param {number} said */
function isNear(own, said) {
  return own === said || Math.abs(own - said) <= 1e-6 * Math.max(own, said);
}

// --- the device ---

/** @param {Said} said */
function hear(said) {
  switch (said.kind) {
    case "elsewhere":
      return showOnly("phone-elsewhere");
    case "none":
      return offer(said.lost);
    case "looked":
      return judge(said);
    case "view":
      return show(said.view);
    case "told":
      part("phone-told", HTMLElement).textContent = say(`told.${said.what}`, { n: said.seq });
      return;
    case "file":
      return showFile(said);
    case "erased":
      location.reload();
      return;
    case "broken":
      part("phone-broken-detail", HTMLElement).textContent = said.detail;
      return showOnly("phone-broken");
  }
}

/** @param {"key" | "ledger" | null} lost */
function offer(lost) {
  showOnly(beginning());
  const notice = part("phone-lost", HTMLElement);
  notice.hidden = lost === null;
  if (lost !== null) notice.textContent = say(`lost.${lost}`);
  for (const each of offers()) tell({ kind: "look", task: each.dataset.join ?? "" });
}

/** Show one part of the page, and hide the others. @param {string} id */
function showOnly(id) {
  for (const each of root.querySelectorAll("[data-part]")) {
    if (each instanceof HTMLElement) each.hidden = each.id !== id;
  }
  document.body.classList.toggle("taking-part", id === "phone-live");
}

/** @param {View} now */
function show(now) {
  const isFirst = view === null;
  view = now;
  if (isFirst) begin(now);
  const title = now.title || say("title"); // the task is read after the device has enrolled
  document.title = `${title} · ${document.title.split(" · ").at(-1)}`;
  part("phone-title", HTMLElement).textContent = title;
  showPhase(now);
  showProgress(now);
  showBudget(now);
  showSent(now);
  showOthers(now);
  showSensing();
  if (now.classes.length && !part("phone-labels", HTMLElement).childElementCount) showLabels(now);
  live.dataset.phase = now.phase;
  live.dataset.checkIns = `${now.checkIns}`;
}

/** The first view of a device: where it goes on, its sensor may need another tap. @param {View} now */
function begin(now) {
  showOnly("phone-live");
  part("phone-lost", HTMLElement).hidden = true;
  part("phone-refusal", HTMLElement).hidden = true;
  if (isJoining) {
    history.replaceState(null, "", "/phone");
    scrollTo({ top: 0 });
    part("phone-title", HTMLElement).focus();
  }
  if (now.phase !== "ended") void persist();
}

/** @param {View} now */
function showPhase({ phase, ending, paused, unanswered, renewed, recovered }) {
  const name = phase === "ended" && ending ? endingName(ending) : `phase.${phase}`;
  const text = say(name, { detail: ending?.detail ?? "" });
  const place = part("phone-phase", HTMLElement);
  if (place.textContent !== text) place.textContent = text;
  part("phone-unanswered", HTMLElement).hidden = !unanswered || phase === "ended";
  part("phone-again", HTMLElement).hidden = !(phase === "ended" && ending?.kind === "refused");
  part("phone-work", HTMLElement).hidden = phase === "ended" || phase === "leaving";
  part("phone-erase", HTMLElement).hidden = ending?.kind !== "withdrawn" && ending?.kind !== "exhausted";
  part("phone-leave", HTMLElement).hidden = ending?.kind === "withdrawn" || phase === "leaving";
  part("phone-pause", HTMLElement).hidden = phase === "ended" || phase === "leaving";
  part("phone-pause", HTMLElement).textContent = say(paused ? "resume" : "pause");
  const old = part("phone-old", HTMLElement);
  old.hidden = !(renewed || recovered);
  if (renewed || recovered) old.textContent = say(renewed ? "renewed" : "recovered");
  if (phase === "ended" && motion.isOn) motion.stop();
  if (phase === "ended" && live.dataset.phase !== "ended") scrollTo({ top: 0 });
}

/** @param {NonNullable<View["ending"]>} ending */
function endingName({ kind, why }) {
  return [`ending.${why}`, `ending.${kind}`].find(hasWord) ?? "ending.refused";
}

/** @param {View} now */
function showProgress({ waiting, batch, full, checkIns }) {
  const bar = part("phone-progress", HTMLProgressElement);
  bar.max = batch || 1;
  bar.value = Math.min(waiting, batch);
  part("phone-waiting", HTMLElement).textContent = say(full ? "full" : "waiting", {
    have: Math.min(waiting, batch),
    batch,
  });
  part("phone-given", HTMLElement).textContent = shown(checkIns);
}

/** @param {View} now */
function showBudget({ samples, most, paid }) {
  part("phone-samples", HTMLElement).textContent = most === null ? shown(samples) : say("of", { have: samples, most });
  const meter = part("phone-budget", HTMLMeterElement);
  meter.max = most ?? 1;
  meter.value = samples;
  part("phone-left", HTMLElement).textContent = say("left", { n: Math.max(0, (most ?? 0) - samples) });
  part("phone-sample", HTMLElement).textContent = say("epsilon", { epsilon: paid.sample });
  part("phone-device", HTMLElement).textContent = say("epsilon", { epsilon: paid.device });
}

/** Studies that this device joined, too: one of them is at work. @param {View} now */
function showOthers({ others }) {
  const list = part("phone-others", HTMLElement);
  part("phone-other", HTMLElement).hidden = !others.length;
  if (list.childElementCount === others.length) return;
  list.replaceChildren(...others.map(({ task, title }) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "button quietly";
    button.textContent = title;
    button.addEventListener("click", () => {
      motion.stop();
      [label, view] = [-1, null];
      taps.length = 0;
      for (const id of ["phone-labels", "phone-others", "phone-rows"]) part(id, HTMLElement).replaceChildren();
      part("phone-new-data", HTMLElement).hidden = true;
      part("phone-source", HTMLInputElement).value = "";
      tell({ kind: "switch", task });
    });
    return button;
  }));
}

/** Everything that left, byte for byte. @param {View} now */
function showSent({ sent }) {
  const list = part("phone-sent", HTMLElement);
  const state = sent.map(({ hash, index }) => `${hash}${index}`).join();
  if (list.dataset.state === state) return;
  const open = new Set([...list.querySelectorAll("details[open]")].map((each) => each.id));
  list.dataset.state = state;
  list.replaceChildren(...sent.map((each) => sentItem(each, open)));
  part("phone-nothing", HTMLElement).hidden = sent.length > 0;
}

/** @param {View["sent"][number]} message @param {ReadonlySet<string>} open */
function sentItem({ seq, at, hash, bytes, index, dropped }, open) {
  const item = document.createElement("li");
  const details = item.appendChild(document.createElement("details"));
  details.id = `sent-${hash.slice(0, 16)}`;
  details.open = open.has(details.id);
  const state = index === null ? (dropped ? "sent.dropped" : "sent.waits") : "sent.receipt";
  const summary = details.appendChild(document.createElement("summary"));
  summary.textContent = say("sent.line", {
    seq,
    time: timeOf(at),
    size: bytes?.length ?? 0,
    state: say(state, { index: index ?? 0 }),
  });
  if (bytes === null) {
    details.append(say("sent.gone"));
    return item;
  }
  const pre = details.appendChild(document.createElement("pre"));
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", say("sent.bytes", { seq }));
  pre.textContent = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
  const note = details.appendChild(document.createElement("p"));
  note.className = "quiet hash";
  note.textContent = say("sent.hash", { hash });
  return item;
}

// --- labels ---

/** @param {View} now */
function showLabels({ classes, features }) {
  part("phone-motion", HTMLElement).hidden = features !== "accelerometer-spectrum";
  part("phone-file", HTMLElement).hidden = features !== "vector";
  if (features !== "accelerometer-spectrum") return;
  const buttons = classes.map((name, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "label";
    button.textContent = name;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => void choose(at));
    return button;
  });
  part("phone-labels", HTMLElement).replaceChildren(...buttons);
}

/** The owner says what is going on: it holds for what is sensed from now on. @param {number} at */
async function choose(at) {
  if (!motion.isOn && !view?.paused) {
    const state = await askForMotion();
    if (state !== "starting") {
      motion.become(state);
      return;
    }
    motion.start();
  }
  if (at === label) return;
  taps.push({ label, tap });
  [label, tap] = [at, Date.now()];
  showLabel();
}

/** Take the last tap back: what was sensed since gets the label before it. None of it is dropped. */
function undo() {
  const before = taps.pop();
  if (!before) return;
  tell({ kind: "relabelled", tap, y: before.label, before: before.tap });
  ({ label, tap } = before);
  showLabel();
}

function showLabel() {
  [...part("phone-labels", HTMLElement).children].forEach((each, at) =>
    each.setAttribute("aria-pressed", `${at === label}`)
  );
  part("phone-undo", HTMLButtonElement).hidden = !taps.length;
  showSensing();
}

function showSensing() {
  const name = motion.state === "sensing" && label < 0 ? "sensing.choose" : `sensing.${motion.state}`;
  const text = say(name === "sensing.off" || name === "sensing.starting" ? "sensing.choose" : name);
  const place = part("phone-sensing", HTMLElement);
  if (place.textContent !== text) place.textContent = text;
  live.dataset.sensing = motion.state;
}

// --- a file ---

/** @param {Extract<Said, { kind: "file" }>} said */
function showFile({ rows, given, faults, why, asks }) {
  const counted = Object.entries(faults ?? {}).map(([name, n]) => say(`fault.${name}`, { n: n ?? 0 }));
  const text = why === null
    ? say("file.rows", { n: rows, given: shown(given) })
    : say(`file.${why}`, { n: (view?.dimension ?? 0) + 1 });
  part("phone-rows", HTMLElement).textContent = [text, ...counted, ...(asks ? [say("file.asks")] : [])].join(" ");
  part("phone-new", HTMLInputElement).checked = false;
  part("phone-new-data", HTMLElement).hidden = !asks;
}

/** A file is for the study that is shown when its owner chooses it. @param {File} chosen @param {string} task */
async function bring(chosen, task) {
  tell({ kind: "file", task, bytes: new Uint8Array(await chosen.arrayBuffer()) });
}

// --- the beginning ---

function listen() {
  part("phone-undo", HTMLButtonElement).addEventListener("click", undo);
  part("phone-pause", HTMLElement).addEventListener("click", () => {
    const pauses = !view?.paused;
    if (pauses) motion.stop();
    else if (label >= 0) void resume();
    tell(pauses ? { kind: "paused" } : { kind: "resumed" });
  });
  part("phone-again", HTMLElement).addEventListener("click", () => tell({ kind: "retried" }));
  const sure = part("phone-sure", HTMLDialogElement);
  part("phone-leave", HTMLElement).addEventListener("click", () => sure.showModal());
  part("phone-stay", HTMLElement).addEventListener("click", () => sure.close());
  part("phone-withdraw", HTMLElement).addEventListener("click", () => {
    sure.close();
    motion.stop();
    tell({ kind: "withdrew" });
  });
  part("phone-erase", HTMLElement).addEventListener("click", () => tell({ kind: "erase" }));
  const file = part("phone-source", HTMLInputElement);
  file.addEventListener("change", () => {
    part("phone-new-data", HTMLElement).hidden = true;
    if (file.files?.[0] && view) void bring(file.files[0], view.task);
  });
  part("phone-new", HTMLInputElement).addEventListener("change", () => {
    part("phone-new-data", HTMLElement).hidden = true;
    if (view) tell({ kind: "new-rows", task: view.task });
  });
  setInterval(() => {
    if (!calm.matches && motion.isOn && document.visibilityState === "visible") {
      drawSpectrum(canvas, motion.cutter.recent);
    }
  }, FRAME);
}

async function resume() {
  if ((await askForMotion()) === "starting") motion.start();
}

async function start() {
  const lacks = await hindrance();
  if (lacks !== null) {
    showOnly(beginning());
    return refuse(lacks);
  }
  listen();
  worker = new Worker(new URL("../device/worker.js", import.meta.url), { type: "module", name: "crowdml-device" });
  worker.addEventListener("message", ({ data }) => hear(/** @type {Said} */ (data)));
  worker.addEventListener("error", () => refuse("old-browser"));
  tell({ kind: "open", offers: offers().map((each) => each.dataset.join ?? "") });
}

void start();
