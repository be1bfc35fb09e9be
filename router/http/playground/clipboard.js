// Copies text, also on pages without TLS, where browsers offer no clipboard API.

const SHOWN_MS = 1500;

/** Copies `text`, and says so on the button that was pressed. */
export async function copyText(text, button) {
  const label = (button.dataset.label ??= button.textContent);
  button.textContent = (await copy(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = label), SHOWN_MS);
}

async function copy(text) {
  if (!navigator.clipboard) return copySelection(text);
  return navigator.clipboard.writeText(text).then(
    () => true,
    () => copySelection(text),
  );
}

function copySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus({ preventScroll: true });
  return copied;
}
