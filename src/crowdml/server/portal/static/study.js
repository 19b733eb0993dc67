// A study's page, live: numbers by server-sent events, plots as interactive charts. The page is complete without it.
import { follow } from "./live.js";
import { chartsOf } from "./charts.js";

const AGAIN = 3000; // milliseconds between two looks at the whole page

const place = document.getElementById("charts");
const charts = place ? chartsOf(place) : null;
const facts = document.getElementById("live");
if (facts?.dataset.liveFrom) {
  follow(facts.dataset.liveFrom, (news) => {
    charts?.refresh(news.index);
    again(Number(news.index ?? 0));
  });
}

let wanted = -1;
let loading = false;

/** Load the `data-again` parts anew whose moment is past, every few seconds at most. @param {number} index */
async function again(index) {
  wanted = Math.max(wanted, index);
  const old = [...document.querySelectorAll("[data-again]")].filter((part) => momentOf(part) < wanted);
  if (!old.length || document.hidden || loading) return;
  loading = true;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of old) {
      const other = fresh.getElementById(part.id);
      if (!other || part.contains(document.activeElement)) continue;
      const adopted = document.importNode(other, true);
      const details = adopted.querySelector("details");
      if (details) details.open = part.querySelector("details")?.open ?? false;
      part.replaceWith(adopted);
    }
  } finally {
    setTimeout(() => {
      loading = false;
      again(wanted); // in case that something came meanwhile
    }, AGAIN);
  }
}

/** @param {Element} part */
function momentOf(part) {
  return Number(/** @type {HTMLElement} */ (part).dataset.again ?? 0);
}
