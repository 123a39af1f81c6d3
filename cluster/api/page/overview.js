// What the server does now: figures, ranks, acceptance by depth, faults, and what is loaded.

import { draw, History } from "./chart.js";
import { byId, cells, element, say, show } from "./dom.js";

const SPAN_S = 300;
const RATE_S = 3; // a rate is that of so many seconds
const POINT_S = 2; // and a point of the line that of so many
const LENGTH_S = 15; // an accept length is that of so many seconds
const REMEMBERED_S = 15; // a gang that has not answered for so long is gone
const MOST_RANKS = 8; // columns of ranks in a table
const NAMES = {
  dtype: "Numbers", device: "Device", attention_backend: "Attention", kernels: "Kernels", num_threads: "Threads of a rank",
  steps_ahead: "Steps that the host is ahead", context_length: "Context, tokens", max_request_tokens: "Longest request, tokens",
  kv_tokens: "KV cache of a rank, tokens", kv_cache_dtype: "Numbers of the KV cache", page_size: "Tokens of a KV page", ranks: "Ranks",
  attention_groups: "Attention groups", speculative_num_steps: "Depth of a tree", speculative_eagle_topk: "Children of a node",
  speculative_num_draft_tokens: "Nodes of a tree, root included", speculative_batch_tiers: "Depth by requests",
};

const speeds = new History(SPAN_S);
const lengths = new History(SPAN_S);
const seen = []; // [seconds, state], those of the last LENGTH_S
const gangs = new Map();

const percent = (share) => `${(100 * share).toFixed(0)} %`;
const figure = (value, digits = 0) => (value === null ? "\u2013" : value.toFixed(digits));

// What a count grew by per second since about `seconds` ago; null where that is not known, as after a replica left.
function growth(count, seconds, now) {
  const then = seen.find(([at]) => now - at <= seconds + 0.5);
  if (!then || seen.at(-1)[0] - then[0] < 0.2) return null;
  const grew = count(seen.at(-1)[1]) - count(then[1]);
  return grew < 0 ? null : { each: grew, second: grew / (seen.at(-1)[0] - then[0]) };
}

function acceptLength(of, now) {
  const trees = growth((state) => of(state).drafts, LENGTH_S, now);
  const accepted = growth((state) => of(state).accepted_draft_tokens, LENGTH_S, now);
  return trees?.each && accepted ? 1 + accepted.each / trees.each : null;
}

const rankOf = (rank) => (state) => state.ranks.find((own) => own.rank === rank) ?? { generated_tokens: 0, drafts: 0, accepted_draft_tokens: 0 };
const inUse = (ranks) => {
  const pages = ranks.flatMap((rank) => (rank.pages ? [rank.pages] : []));
  const whole = pages.reduce((sum, own) => sum + own.used + own.cached + own.free, 0);
  return whole ? pages.reduce((sum, own) => sum + own.used, 0) / whole : null;
};

export function showState(state) {
  const now = performance.now() / 1000;
  seen.push([now, state]);
  while (seen.length > 2 && now - seen[1][0] > LENGTH_S) seen.shift();
  gangs.set(state.gang, [now, state]);
  for (const [name, [at]] of gangs) if (now - at > REMEMBERED_S) gangs.delete(name);

  const speed = growth((one) => one.counts.generated_tokens, RATE_S, now)?.second ?? null;
  const length = acceptLength((one) => one.counts, now);
  speeds.add(now, growth((one) => one.counts.generated_tokens, POINT_S, now)?.second ?? null);
  lengths.add(now, length);
  const lives = [...gangs.values()].sort(([, a], [, b]) => (a.gang < b.gang ? -1 : 1)).map(([, own]) => own);
  showFigures(state, lives, speed, length);
  draw(byId("speed"), speeds, now, 0);
  draw(byId("lengths"), lengths, now, 2);
  showRanks(lives, now);
  showDepths(state);
  showFaults(state, lives);
  showLoaded(state);
}

function showFigures(state, lives, speed, length) {
  const used = inUse(lives.flatMap((own) => own.ranks));
  const figures = [
    ["Tokens per second", figure(speed, 1)],
    ["Accept length", figure(length, 2)],
    ["Streaming", state.requests.streaming],
    ["Waiting", state.requests.waiting],
    ["Tokens queued", lives.reduce((sum, own) => sum + own.requests.queued_tokens, 0)],
    ["KV pages in use", used === null ? "\u2013" : percent(used)],
  ];
  show(byId("figures"), ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function bar(share, text) {
  const whole = element("meter", { min: 0, max: 1, value: share.toFixed(3), "aria-hidden": "true" });
  return element("td", { class: "barred" }, whole, element("span", {}, text));
}

function rankRow(rank, gang, now) {
  const name = gangs.size > 1 ? `${gang.slice(-6)} / ${rank.rank}` : String(rank.rank);
  if (rank.state === "silent") return cells("td", [name, element("td", { class: "bad" }, "silent"), ...Array(7).fill("\u2013")]);
  const used = inUse([rank]);
  const speed = growth((state) => rankOf(rank.rank)(state).generated_tokens, RATE_S, now)?.second ?? null;
  return cells("td", [
    name, element("td", { class: rank.state }, rank.state), rank.phase || "\u2013", rank.step, rank.running, rank.waiting,
    figure(speed, 1), figure(acceptLength(rankOf(rank.rank), now), 2), used === null ? "\u2013" : bar(used, percent(used)),
  ]);
}

function showRanks(lives, now) {
  const head = cells("th", ["Rank", "State", "Phase", "Step", "Running", "Waiting", "Tokens/s", "Accept length", "KV in use"]);
  const rows = lives.flatMap((own) => own.ranks.map((rank) => rankRow(rank, own.gang, now)));
  show(byId("ranks"), element("thead", {}, head), element("tbody", {}, ...rows));
}

function showDepths(state) {
  const { drafts, accepted_draft_tokens: accepted } = state.counts;
  const none = state.settings.draft === null ? "No draft is loaded: each step gives one token." : "No tree has been verified yet.";
  say(byId("trees"), drafts ? `Since the start ${drafts} trees were verified; each gave ${(1 + accepted / drafts).toFixed(2)} tokens on average. A row says how many of them were accepted to that depth.` : none);
  showDoubts(state);
  if (!drafts) return show(byId("depths"));
  const ranks = state.ranks.slice(0, MOST_RANKS);
  const head = cells("th", ["Depth", "All ranks", ...(ranks.length > 1 ? ranks.map((rank) => `Rank ${rank.rank}`) : [])]);
  const share = (of, depth) => (of.drafts ? (of.accepted_by_depth[depth] ?? 0) / of.drafts : 0);
  const beyond = state.accepted_by_depth.findLastIndex((count) => count > 0) + 1; // what a grammar forces goes deeper
  const depths = Math.max(beyond, state.settings.speculative_num_steps ?? 0);
  const rows = state.accepted_by_depth.slice(0, depths).map((count, depth) => {
    const all = count / drafts;
    const own = ranks.length > 1 ? ranks.map((rank) => bar(share(rank, depth), percent(share(rank, depth)))) : [];
    return cells("td", [depth + 1, bar(all, percent(all)), ...own]);
  });
  show(byId("depths"), element("thead", {}, head), element("tbody", {}, ...rows));
}

function showDoubts(state) {
  const ranks = state.ranks.filter((rank) => rank.draft_rejected).map((rank) => rank.rank);
  const reasons = "it was trained for another target, tokenizer or kind of text, its vocabulary map (d2t) is wrong, or its config is misread, such as the target layers that it reads. Try aerie probe-draft.";
  const told = ranks.length ? [`The draft is hardly ever accepted on rank ${ranks.join(", ")}, so it only costs time. Likely reasons: ${reasons}`] : [];
  const noted = (state.settings.draft?.doubts ?? []).map((doubt) => `Noted when the draft was read: ${doubt}.`);
  show(byId("doubts"), ...[...told, ...noted].map((text) => element("li", { class: "bad" }, text)));
}

function faultOf(loss) {
  const when = new Date(1000 * loss.at).toLocaleTimeString();
  const after = loss.restored_s === null ? "not serving again yet" : `served again after ${loss.restored_s.toFixed(1)} s`;
  const why = loss.reason ? `: ${loss.reason}` : "";
  const kind = loss.kind.replaceAll("_", " ");
  return element("li", { class: loss.restored_s === null ? "bad" : null }, `${when}, rank ${loss.rank} ${kind} at step ${loss.step}, phase ${loss.phase || "none"}${why}. The gang ${after}.`);
}

function showFaults(state, lives) {
  const { rank_losses: losses, gang_restarts: restarts, resumed_streams: resumed } = state.counts;
  say(byId("fault-counts"), losses ? `${losses} lost, ${restarts} restarts, ${resumed} streams resumed.` : "None since the start.");
  const latest = lives.flatMap((own) => own.losses).sort((a, b) => b.at - a.at);
  show(byId("faults"), ...latest.slice(0, 20).map(faultOf));
}

function showLoaded(state) {
  const { draft, ...settings } = state.settings;
  const rows = [["Model", state.model], ["Draft", draft ? `${draft.algorithm} (${draft.kind})` : "none"], ["Version", state.version]];
  for (const [name, value] of Object.entries(settings)) {
    const empty = value !== null && typeof value === "object" && !Object.keys(value).length;
    if (value !== null && !empty) rows.push([NAMES[name] ?? name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
  }
  show(byId("loaded"), ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}
