// A study's page, live: numbers by server-sent events, plots as interactive charts. The page is complete without it.
import { follow } from "./live.js";
import { chartsOf } from "./charts.js";

const AGAIN = 3000; // milliseconds between two looks at the whole page

document.documentElement.classList.add("scripted");

const place = document.getElementById("charts");
const charts = place ? chartsOf(place) : null;
const facts = document.getElementById("live");
if (facts?.dataset.liveFrom) {
  follow(facts.dataset.liveFrom, (news) => {
    charts?.refresh(news.index);
    again(Number(news.index ?? 0));
  });
}

let shown = -1; // the moment that the parts show which are loaded again
let wanted = -1;
let loading = false;

/** Load the page's `data-again` parts anew when something happened, every few seconds at most. @param {number} index */
async function again(index) {
  wanted = Math.max(wanted, index);
  const parts = document.querySelectorAll("[data-again]");
  if (!parts.length || document.hidden || loading || wanted <= shown) return;
  loading = true;
  try {
    if (shown >= 0) {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of parts) {
        const other = fresh.getElementById(part.id);
        if (!other || part.contains(document.activeElement)) continue;
        const adopted = document.importNode(other, true);
        const open = part.querySelector("details")?.open;
        const details = adopted.querySelector("details");
        if (details && open) details.open = true;
        part.replaceWith(adopted);
      }
    }
    shown = index;
  } finally {
    setTimeout(() => {
      loading = false;
      if (shown >= 0 && wanted > shown) again(wanted); // it came meanwhile
    }, AGAIN);
  }
}
