// What survives a reload: kept by the browser for this tab alone, until the tab is closed.

const STATE = "octavo-playground";
const VERSION = 3;
const MODES = ["chat", "text", "batch"];
const MAX_CHARACTERS = 1_000_000; // of questions and answers as JSON, in each mode

/** Saves the page's state; of each mode's answers the newest, as many as there is room for. */
export function save(state) {
  const views = Object.entries(state.views).map(([mode, view]) => [
    mode,
    { ...view, answers: newest(view.answers) },
  ]);
  const saved = { ...state, views: Object.fromEntries(views), version: VERSION };
  try {
    sessionStorage.setItem(STATE, JSON.stringify(saved));
  } catch {
    // Storage is full or forbidden: the page works without.
  }
}

/** Returns what was saved, or null. */
export function load() {
  try {
    const state = JSON.parse(sessionStorage.getItem(STATE));
    return isWhole(state) ? state : null;
  } catch {
    return null;
  }
}

function isWhole(state) {
  if (state?.version !== VERSION || !state.settings?.values) return false;
  return MODES.every((mode) => Array.isArray(state.views?.[mode]?.answers));
}

function newest(answers) {
  let left = MAX_CHARACTERS;
  const first = answers.findLastIndex((answer) => {
    left -= JSON.stringify(answer).length;
    return left < 0;
  });
  return answers.slice(first + 1);
}
