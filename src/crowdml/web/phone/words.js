/**
 * Sentences of the catalogue, in the page's language. The server puts them into the page; none stands in a script.
 */

/** @type {{ [name: string]: string }} */
const sentences = JSON.parse(document.getElementById("phone-words")?.dataset.words ?? "{}");
const page = document.documentElement.lang;
const language = navigator.languages.find((each) => each.split("-")[0] === page) ?? page;
const whole = new Intl.NumberFormat(language);
const rounded = new Intl.NumberFormat(language, { maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat(language, { timeStyle: "medium" });

/** @param {string} name @returns {boolean} */
export function hasWord(name) {
  return name in sentences || `${name}.other` in sentences;
}

/** The sentence of this name with its places filled in; `n` chooses between one and many.
 * @param {string} name @param {{ [place: string]: string | number }} [values] @returns {string} */
export function say(name, values = {}) {
  const chosen = name in sentences ? name : `${name}.${values.n === 1 ? "one" : "other"}`;
  const sentence = sentences[chosen] ?? name;
  return sentence.replaceAll(/\{(\w+)\}/g, (place, key) => (key in values ? shown(values[key]) : place));
}

/** @param {string | number} value @returns {string} */
export function shown(value) {
  if (typeof value === "string") return value;
  if (value === Infinity) return "∞";
  return Number.isInteger(value) ? whole.format(value) : rounded.format(value);
}

/** @param {string} at UTC @returns {string} */
export function timeOf(at) {
  return clock.format(new Date(at));
}
