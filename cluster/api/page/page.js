// The page itself: the door for the key, two views, and a look at the server once a second while the page is visible.

import { byId, say } from "./dom.js";
import { showState } from "./overview.js";
import { begin } from "./playground.js";
import { key, Refused, state, useKey } from "./server.js";

const EVERY_MS = 1000;
const VIEWS = ["overview", "playground"];

let timer = 0;
let looking = false;

function health(kind, text) {
  byId("health").className = kind;
  say(byId("health"), text);
}

function open(allowed) {
  byId("door").hidden = allowed;
  document.querySelector("main").hidden = !allowed;
  byId("forget").hidden = !allowed || !key();
}

function denied(error) {
  open(false);
  health("bad", "a key is needed");
  say(byId("denied"), key() ? error.message : "");
  useKey("");
  byId("key").focus();
}

async function look() {
  if (looking || document.hidden) return;
  looking = true;
  clearTimeout(timer);
  let again = true;
  try {
    const now = await state();
    open(true);
    const lost = now.losses.at(-1);
    const who = lost && lost.restored_s === null ? `: rank ${lost.rank} ${lost.kind.replaceAll("_", " ")}` : "";
    health(now.healthy ? "good" : "bad", now.healthy ? "serving" : `not serving${now.reason ? `: ${now.reason}` : who}`);
    say(byId("served"), `${now.model}, version ${now.version}`);
    document.title = `${now.model} \u2013 Aerie`;
    showState(now);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      again = false;
      denied(error);
    } else {
      health("bad", `no answer: ${error.message}`);
    }
  } finally {
    looking = false;
    if (again) timer = setTimeout(look, EVERY_MS);
  }
}

function view(name, focus) {
  for (const each of VIEWS) {
    byId(each).hidden = each !== name;
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    if (each === name && focus) tab.focus();
  }
  history.replaceState(null, "", `#${name}`);
}

for (const [at, name] of VIEWS.entries()) {
  byId(`tab-${name}`).addEventListener("click", () => view(name, false));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) view(VIEWS[(at + by + VIEWS.length) % VIEWS.length], true);
  });
}
byId("door").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  look();
});
byId("forget").addEventListener("click", () => {
  useKey("");
  location.reload();
});
document.addEventListener("visibilitychange", look);
begin();
if (VIEWS.includes(location.hash.slice(1))) view(location.hash.slice(1), false);
look();
