// What the server does now: figures, ranks, acceptance by depth, faults, and what is loaded.

import { draw, History } from "./chart.js";
import { byId, tableRow, element, setText, setChildren } from "./dom.js";

const SPAN_S = 300;
const RATE_SPAN_S = 3; // seconds over which a rate is measured
const POINT_SPAN_S = 2; // the same for a point of the chart
const ACCEPT_LENGTH_SPAN_S = 15; // the same for an accept length
const GANG_TIMEOUT_S = 15; // a gang that has not answered for so long is gone
const MAX_RANKS = 8; // columns of ranks in a table
const SETTING_LABELS = {
  dtype: "Numbers", device: "Device", attention_backend: "Attention", kernels: "Kernels", num_threads: "Threads of a rank",
  steps_ahead: "Steps that the host is ahead", context_length: "Context, tokens", max_request_tokens: "Longest request, tokens",
  kv_tokens: "KV cache of a rank, tokens", kv_cache_dtype: "Numbers of the KV cache", page_size: "Tokens of a KV page", ranks: "Ranks",
  attention_groups: "Attention groups", speculative_mode: "Tree of a step", speculative_num_steps: "Depth of a tree", speculative_eagle_topk: "Children of a node",
  speculative_num_draft_tokens: "Nodes of a tree, root included",
  speculative_lookup_tokens: "Looked-up tokens beside a tree", speculative_batch_tiers: "Depth by requests",
};

const speeds = new History(SPAN_S);
const lengths = new History(SPAN_S);
const samples = []; // [seconds, state], of the last ACCEPT_LENGTH_SPAN_S
const gangs = new Map();

const percent = (share) => `${(100 * share).toFixed(0)} %`;
const formatted = (value, digits = 0) => (value === null ? "\u2013" : value.toFixed(digits));

// The increase of a count since about `seconds` ago, in total and per second; null if unknown, as after a replica left.
function increaseOver(count, seconds, now) {
  const earlier = samples.find(([time]) => now - time <= seconds + 0.5);
  if (!earlier || samples.at(-1)[0] - earlier[0] < 0.2) return null;
  const increase = count(samples.at(-1)[1]) - count(earlier[1]);
  return increase < 0 ? null : { total: increase, perSecond: increase / (samples.at(-1)[0] - earlier[0]) };
}

function acceptLength(countsOf, now) {
  const trees = increaseOver((state) => countsOf(state).drafts, ACCEPT_LENGTH_SPAN_S, now);
  const accepted = increaseOver((state) => countsOf(state).accepted_draft_tokens, ACCEPT_LENGTH_SPAN_S, now);
  return trees?.total && accepted ? 1 + accepted.total / trees.total : null;
}

const rankCounts = (rank) => (state) => state.ranks.find((entry) => entry.rank === rank) ?? { generated_tokens: 0, drafts: 0, accepted_draft_tokens: 0 };
const usedShare = (ranks) => {
  const pages = ranks.flatMap((rank) => (rank.pages ? [rank.pages] : []));
  const totalPages = pages.reduce((sum, counts) => sum + counts.used + counts.cached + counts.free, 0);
  return totalPages ? pages.reduce((sum, counts) => sum + counts.used, 0) / totalPages : null;
};

export function showState(state) {
  const now = performance.now() / 1000;
  samples.push([now, state]);
  while (samples.length > 2 && now - samples[1][0] > ACCEPT_LENGTH_SPAN_S) samples.shift();
  gangs.set(state.gang, [now, state]);
  for (const [name, [lastSeenAt]] of gangs) if (now - lastSeenAt > GANG_TIMEOUT_S) gangs.delete(name);

  const speed = increaseOver((each) => each.counts.generated_tokens, RATE_SPAN_S, now)?.perSecond ?? null;
  const acceptLengthNow = acceptLength((each) => each.counts, now);
  speeds.add(now, increaseOver((each) => each.counts.generated_tokens, POINT_SPAN_S, now)?.perSecond ?? null);
  lengths.add(now, acceptLengthNow);
  const gangStates = [...gangs.values()].sort(([, a], [, b]) => (a.gang < b.gang ? -1 : 1)).map(([, gangState]) => gangState);
  showFigures(state, gangStates, speed, acceptLengthNow);
  draw(byId("speed"), speeds, now, 0);
  draw(byId("lengths"), lengths, now, 2);
  showRanks(gangStates, now);
  showDepths(state);
  showFaults(state, gangStates);
  showLoaded(state);
}

function showFigures(state, gangStates, speed, acceptLengthNow) {
  const kvShare = usedShare(gangStates.flatMap((gang) => gang.ranks));
  const figures = [
    ["Tokens per second", formatted(speed, 1)],
    ["Accept length", formatted(acceptLengthNow, 2)],
    ["Streaming", state.requests.streaming],
    ["Waiting", state.requests.waiting],
    ["Tokens queued", gangStates.reduce((sum, gang) => sum + gang.requests.queued_tokens, 0)],
    ["KV pages in use", kvShare === null ? "\u2013" : percent(kvShare)],
  ];
  setChildren(byId("figures"), ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function meterCell(share, text) {
  const meter = element("meter", { min: 0, max: 1, value: share.toFixed(3), "aria-hidden": "true" });
  return element("td", { class: "meter-cell" }, meter, element("span", {}, text));
}

function rankRow(rank, gang, now) {
  const name = gangs.size > 1 ? `${gang.slice(-6)} / ${rank.rank}` : String(rank.rank);
  if (rank.state === "silent") return tableRow("td", [name, element("td", { class: "bad" }, "silent"), ...Array(7).fill("\u2013")]);
  const kvShare = usedShare([rank]);
  const speed = increaseOver((state) => rankCounts(rank.rank)(state).generated_tokens, RATE_SPAN_S, now)?.perSecond ?? null;
  return tableRow("td", [
    name, element("td", { class: rank.state }, rank.state), rank.phase || "\u2013", rank.step, rank.running, rank.waiting,
    formatted(speed, 1), formatted(acceptLength(rankCounts(rank.rank), now), 2), kvShare === null ? "\u2013" : meterCell(kvShare, percent(kvShare)),
  ]);
}

function showRanks(gangStates, now) {
  const head = tableRow("th", ["Rank", "State", "Phase", "Step", "Running", "Waiting", "Tokens/s", "Accept length", "KV in use"]);
  const rows = gangStates.flatMap((gang) => gang.ranks.map((rank) => rankRow(rank, gang.gang, now)));
  setChildren(byId("ranks"), element("thead", {}, head), element("tbody", {}, ...rows));
}

function showDepths(state) {
  const { drafts, accepted_draft_tokens: accepted } = state.counts;
  const emptyText = state.settings.draft === null ? "No draft is loaded: each step gives one token." : "No tree has been verified yet.";
  setText(byId("trees"), drafts ? `Since the start ${drafts} trees were verified; each gave ${(1 + accepted / drafts).toFixed(2)} tokens on average. A row says how many of them were accepted to that depth.` : emptyText);
  showDoubts(state);
  if (!drafts) return setChildren(byId("depths"));
  const ranks = state.ranks.slice(0, MAX_RANKS);
  const head = tableRow("th", ["Depth", "All ranks", ...(ranks.length > 1 ? ranks.map((rank) => `Rank ${rank.rank}`) : [])]);
  const share = (rank, depth) => (rank.drafts ? (rank.accepted_by_depth[depth] ?? 0) / rank.drafts : 0);
  const deepestAccepted = state.accepted_by_depth.findLastIndex((count) => count > 0) + 1; // what a grammar forces goes deeper
  const depths = Math.max(deepestAccepted, state.settings.speculative_num_steps ?? 0);
  const rows = state.accepted_by_depth.slice(0, depths).map((count, depth) => {
    const allRanksShare = count / drafts;
    const rankCells = ranks.length > 1 ? ranks.map((rank) => meterCell(share(rank, depth), percent(share(rank, depth)))) : [];
    return tableRow("td", [depth + 1, meterCell(allRanksShare, percent(allRanksShare)), ...rankCells]);
  });
  setChildren(byId("depths"), element("thead", {}, head), element("tbody", {}, ...rows));
}

function showDoubts(state) {
  const ranks = state.ranks.filter((rank) => rank.draft_rejected).map((rank) => rank.rank);
  const reasons = "it was trained for another target, tokenizer or kind of text, its vocabulary map (d2t) is wrong, or its config is misread, such as the target layers that it reads. Try aerie probe-draft.";
  const rejectedTexts = ranks.length ? [`The draft is hardly ever accepted on rank ${ranks.join(", ")}, so it only costs time. Likely reasons: ${reasons}`] : [];
  const doubtTexts = (state.settings.draft?.doubts ?? []).map((doubt) => `Noted when the draft was read: ${doubt}.`);
  setChildren(byId("doubts"), ...[...rejectedTexts, ...doubtTexts].map((text) => element("li", { class: "bad" }, text)));
}

function faultItem(loss) {
  const when = new Date(1000 * loss.at).toLocaleTimeString();
  const recovery = loss.restored_s === null ? "not serving again yet" : `served again after ${loss.restored_s.toFixed(1)} s`;
  const reason = loss.reason ? `: ${loss.reason}` : "";
  const kind = loss.kind.replaceAll("_", " ");
  return element("li", { class: loss.restored_s === null ? "bad" : null }, `${when}, rank ${loss.rank} ${kind} at step ${loss.step}, phase ${loss.phase || "none"}${reason}. The gang ${recovery}.`);
}

function showFaults(state, gangStates) {
  const { rank_losses: losses, gang_restarts: restarts, resumed_streams: resumed } = state.counts;
  setText(byId("fault-counts"), losses ? `${losses} lost, ${restarts} restarts, ${resumed} streams resumed.` : "None since the start.");
  const recentLosses = gangStates.flatMap((gang) => gang.losses).sort((a, b) => b.at - a.at);
  setChildren(byId("faults"), ...recentLosses.slice(0, 20).map(faultItem));
}

function showLoaded(state) {
  const { draft, ...settings } = state.settings;
  const rows = [["Model", state.model], ["Draft", draft ? `${draft.algorithm} (${draft.kind})` : "none"], ["Version", state.version]];
  for (const [name, value] of Object.entries(settings)) {
    const isEmptyObject = value !== null && typeof value === "object" && !Object.keys(value).length;
    if (value !== null && !isEmptyObject) rows.push([SETTING_LABELS[name] ?? name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
  }
  setChildren(byId("loaded"), ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}
