/**
 * What every page does where scripts run: times in the reader's time zone, commands that are copied, and a page that is
 * handed on. Without it times are UTC, and a page is handed on by mail.
 */

const page = document.documentElement.lang;
const language = navigator.languages.find((each) => each.split("-")[0] === page) ?? page; // British readers of English pages have British times
const full = new Intl.DateTimeFormat(language, { dateStyle: "long", timeStyle: "short" });
const clock = new Intl.DateTimeFormat(language, { timeStyle: "short" });
const ago = new Intl.RelativeTimeFormat(language, { numeric: "auto" });
/** @type {[Intl.RelativeTimeFormatUnit, number][]} */
const UNITS = [["second", 1], ["minute", 60], ["hour", 3600], ["day", 24 * 3600]]; // seconds
const WEEK = 7 * 24 * 3600;

/** Show a time as this reader reads it: `data-relative` as "5 minutes ago" for a week, with the date on hover. */
function tell(/** @type {HTMLTimeElement} */ time) {
  const at = Date.parse(time.dateTime);
  if (Number.isNaN(at)) return;
  const date = (time.hasAttribute("data-clock") ? clock : full).format(at);
  const past = (Date.now() - at) / 1000;
  const isNear = time.hasAttribute("data-relative") && past >= 0 && past < WEEK;
  const text = isNear ? near(past) : date;
  if (time.textContent !== text) time.textContent = text;
  time.title = isNear ? date : zone(at);
}

function near(/** @type {number} */ seconds) {
  const [unit, size] = UNITS.findLast(([, size]) => seconds >= size) ?? UNITS[0];
  return ago.format(-Math.floor(seconds / size), unit);
}

/** The name of the reader's time zone, so that nobody has to guess. */
function zone(/** @type {number} */ at) {
  const parts = new Intl.DateTimeFormat(language, { timeZoneName: "long" }).formatToParts(at);
  return parts.find((part) => part.type === "timeZoneName")?.value ?? "";
}

function tellAll() {
  for (const time of document.querySelectorAll("time")) tell(time);
}

document.documentElement.classList.add("scripted");
tellAll();
setInterval(tellAll, 30_000);
new MutationObserver((changes) => {
  const isNew = changes.some((change) => [...change.addedNodes].some((node) => node instanceof Element && (node.matches("time") || node.querySelector("time"))));
  if (isNew) tellAll();
}).observe(document.body, { childList: true, subtree: true });

const SHOWN = 2000; // milliseconds for which a button says that it copied

/** Copy the command beside the button. A page without TLS has no clipboard: there the browser copies a selection. */
async function copy(/** @type {HTMLButtonElement} */ button) {
  const text = button.parentElement?.querySelector("pre");
  if (!text) return;
  try {
    await navigator.clipboard.writeText(text.textContent?.trim() ?? "");
  } catch {
    getSelection()?.selectAllChildren(text);
    document.execCommand("copy");
  }
  const before = button.textContent;
  button.textContent = button.dataset.copied ?? before;
  setTimeout(() => button.textContent = before, SHOWN);
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", () => copy(/** @type {HTMLButtonElement} */ (button)));
}
for (const link of document.querySelectorAll("[data-share]")) {
  link.addEventListener("click", (event) => {
    if (!navigator.share) return; // by mail
    event.preventDefault();
    navigator.share({ title: document.title, url: /** @type {HTMLElement} */ (link).dataset.address }).catch(() => {});
  });
}
