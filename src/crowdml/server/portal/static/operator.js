/** Operator pages that look again by themselves. Without this they are read as they are, and loaded again by hand. */

const EVERY = 5; // seconds

/** Put the same part of a newly loaded page in the place of this one, unless somebody is at work in it. */
async function look(/** @type {HTMLElement} */ part) {
  const busy = part.contains(document.activeElement) && document.activeElement !== part;
  if (document.hidden || busy || part.querySelector("details[open]")) return part;
  const answer = await fetch(location.pathname, { headers: { "crowdml-live": "1", accept: "text/html" } });
  if (!answer.ok || answer.redirected) return location.reload(), part;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(part.id);
  if (!fresh) return location.reload(), part;
  const adopted = document.importNode(fresh, true);
  part.replaceWith(adopted);
  if (part.hasAttribute("data-refresh") && !adopted.hasAttribute("data-refresh")) location.reload(); // it is over
  return adopted;
}

async function follow(/** @type {HTMLElement} */ part) {
  const wait = 1000 * Number(part.dataset.refresh || EVERY);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      part = await look(part);
    } catch {
      // the server is away for a moment: look again later
    }
    if (!part.isConnected || !part.hasAttribute("data-refresh")) return;
  }
}

/** Of a form, show the fields that belong to what is chosen. Without this all of them are there, and say what for. */
function choose(/** @type {HTMLFormElement} */ form) {
  for (const field of form.querySelectorAll("[data-when]")) {
    const { when, is } = /** @type {HTMLElement} */ (field).dataset;
    const choice = form.elements.namedItem(when ?? "");
    /** @type {HTMLElement} */ (field).hidden = choice instanceof HTMLSelectElement && !is?.split(" ").includes(choice.value);
  }
}

/** A network needs a clip: begin with 1. The server fills it in, too, where no script runs. */
function clip(/** @type {HTMLFormElement} */ form, /** @type {EventTarget | null} */ changed) {
  const field = form.elements.namedItem("protocol.clip");
  const isNetwork = changed instanceof HTMLSelectElement && changed.name === "model.kind" && changed.value === "mlp";
  if (isNetwork && field instanceof HTMLInputElement && !field.value) field.value = "1";
}

for (const form of document.querySelectorAll("form.task-form")) {
  choose(/** @type {HTMLFormElement} */ (form));
  form.addEventListener("change", () => choose(/** @type {HTMLFormElement} */ (form)));
  form.addEventListener("change", (event) => clip(/** @type {HTMLFormElement} */ (form), event.target));
}
const data = document.querySelector("select#data"), devices = document.querySelector("input#devices");
if (data instanceof HTMLSelectElement && devices instanceof HTMLInputElement) { // each data set makes a crowd of its own size
  data.addEventListener("change", () => devices.value = data.selectedOptions[0]?.dataset.devices ?? devices.value);
}
for (const part of document.querySelectorAll("[data-refresh]")) follow(/** @type {HTMLElement} */ (part));
for (const button of document.querySelectorAll("[data-print]")) button.addEventListener("click", () => print());
