// A study's page, live: numbers by server-sent events, plots as interactive charts. The page is complete without it.
import { follow } from "./live.js";
import { chartsOf } from "./charts.js";

document.documentElement.classList.add("scripted");

const place = document.getElementById("charts");
const charts = place ? chartsOf(place) : null;
const facts = document.getElementById("live");
if (facts?.dataset.liveFrom) {
  follow(facts.dataset.liveFrom, (news) => charts?.refresh(news.index));
}
