// The column on the right: what the engines say of themselves, several times a second.

import { get } from "./api.js";
import { drawBlocks } from "./blocks.js";

const POLL_MS = 250;
const MAX_PAUSE_MS = 4000; // after errors
const MODELS_MS = 1000;
const RATE_MS = 2000; // tokens/s are counted over so long
const SPARK_POINTS = 120;
const GRID_HEIGHT = 250;
const SWAP_HEIGHT = 48;

const $ = (selector, from = document) => from.querySelector(selector);

const history = []; // [milliseconds, output tokens] of the last RATE_MS
const rates = Array(SPARK_POINTS).fill(0);

/**
 * Follows /status for as long as the page is open, and rests while it is not seen.
 *
 * @param {object} options
 * @param {(models: object[]) => void} options.onModels is called with those that can be asked for
 * @param {() => void} options.onRefused is called when the server wants another API key
 * @returns {() => void} asks at once
 */
export function follow({ onModels, onRefused }) {
  let timer = 0;
  let pause = POLL_MS;
  let turn = 0; // only the latest loop goes on
  let listed = -MODELS_MS; // when models were asked for
  let loadable = false; // whether a request would load a model
  const poll = async () => {
    try {
      const status = await get("status");
      if (performance.now() - listed >= MODELS_MS) {
        const { data } = await get("v1/models");
        const models = data.filter(({ id, root }) => id === root); // without aliases
        listed = performance.now();
        loadable = models.some(({ status }) => status.value !== "loaded");
        onModels(models);
      }
      show(status, loadable);
      pause = POLL_MS;
    } catch (error) {
      showNotice(error.message);
      if (error.status === 401) onRefused();
      pause = Math.min(2 * pause, MAX_PAUSE_MS);
    }
  };
  const loop = async (mine) => {
    if (!document.hidden) await poll();
    if (mine === turn) timer = setTimeout(loop, pause, mine);
  };
  const start = () => {
    listed = -MODELS_MS;
    pause = POLL_MS;
    clearTimeout(timer);
    loop(++turn);
  };
  start();
  return start;
}

function show(status, loadable) {
  const none = loadable ? "No model is loaded: a request loads its own." : "No engine is up.";
  showNotice(status.engines.length ? "" : none);
  showRate(status.output_tokens);
  const list = $("#engines");
  while (list.children.length > status.engines.length) list.lastElementChild.remove();
  while (list.children.length < status.engines.length)
    list.append($("#engine-template").content.cloneNode(true));
  const several = status.engines.length > 1;
  status.engines.forEach((engine, i) => {
    const card = list.children[i];
    const role = engine.role === "both" ? "" : ` (${engine.role})`;
    $(".name", card).textContent = several ? `Engine ${i + 1}${role}: KV cache` : "KV cache";
    showEngine(card, engine, several ? GRID_HEIGHT / 2 : GRID_HEIGHT);
  });
}

function showNotice(text) {
  if ($("#notice").textContent !== text) $("#notice").textContent = text;
}

function showRate(tokens) {
  const now = performance.now();
  if (history.length && tokens < history.at(-1)[1]) history.length = 0; // another router
  history.push([now, tokens]);
  while (history.length > 2 && now - history[0][0] > RATE_MS) history.shift();
  const [then, before] = history[0];
  const rate = now > then ? ((tokens - before) * 1000) / (now - then) : 0;
  rates.push(rate);
  rates.shift();
  $("#rate").textContent = Math.round(rate);
  const top = Math.max(...rates, 10);
  const points = rates.map((r, i) => `${i},${(27 - (25 * r) / top).toFixed(2)}`);
  $("#spark .line").setAttribute("d", `M${points.join("L")}`);
  $("#spark .area").setAttribute("d", `M0,28L${points.join("L")}L${SPARK_POINTS - 1},28Z`);
}

function showEngine(card, engine, gridHeight) {
  const load = engine.load;
  const inUse = load.total_blocks - load.free_blocks - load.cached_blocks;
  const counts = {
    shared: load.shared_blocks,
    used: inUse - load.shared_blocks,
    free: load.free_blocks,
    cached: load.cached_blocks,
    swapped: load.used_swap_blocks,
    swap_cached: load.cached_swap_blocks,
  };
  for (const item of card.querySelectorAll(".legend li"))
    $("output", item).textContent = counts[item.dataset.state];
  const kept = engine.taking_requests ? "" : ", takes no requests now";
  $(".device", card).textContent = `${engine.model} on ${engine.device}, ${engine.dtype}${kept}`;
  $(".in-use", card).textContent = inUse;
  $(".figure .of", card).textContent =
    `of ${load.total_blocks} blocks in use, ${engine.block_size} tokens each`;
  const kinds = ["shared", "used", "free", "cached"].map((name) => [name, counts[name]]);
  drawBlocks($(".blocks", card), kinds, gridHeight);
  showSwap($(".swap", card), load, counts);
  $(".disk", card).hidden = !load.disk_blocks;
  const share = Math.round(100 * load.disk_read_share);
  $(".disk .of", card).textContent = `${load.disk_blocks} blocks, read in ${share}% of computing time`;
  const slots = inUse * engine.block_size;
  const values = {
    running: load.running,
    waiting: load.waiting,
    swapped: load.swapped,
    step: load.running ? `${(load.step_seconds * 1000).toFixed(0)} ms` : "–",
    waste: slots ? `${((100 * load.wasted_slots) / slots).toFixed(1)}%` : "–",
  };
  for (const [name, value] of Object.entries(values))
    $(`[data-value="${name}"]`, card).textContent = value;
}

function showSwap(part, load, counts) {
  part.hidden = !load.total_swap_blocks;
  if (part.hidden) return;
  const free = load.total_swap_blocks - counts.swapped - counts.swap_cached;
  $(".of", part).textContent = `${load.total_swap_blocks} blocks`;
  const kinds = [["swapped", counts.swapped], ["free", free], ["swap_cached", counts.swap_cached]];
  drawBlocks($("canvas", part), kinds, SWAP_HEIGHT);
}
