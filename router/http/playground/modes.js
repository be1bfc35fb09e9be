// What the page says at first in each mode.

export const LABELS = {
  chat: "Message",
  text: "Text to go on from",
  batch: "Messages, one a line, all at once",
};
export const BATCH = [
  "Why is the sky blue?",
  "How do bees find their way home?",
  "Tell a short story about a lighthouse.",
  "What makes bread rise?",
  "Explain tides to a child.",
  "Write a poem about old maps.",
  "How does a sailing boat go against the wind?",
  "What is a prime number?",
  "Describe a forest in autumn.",
  "Why do we dream?",
  "How was paper invented?",
  "What do whales sing about?",
].join("\n");
export const BATCH_SYSTEM =
  "You are a patient teacher who has read widely. Answer in plain words and whole sentences, " +
  "begin with what matters most, give one example from everyday life, and admit what is not known. " +
  "Do not repeat the question, use no lists and no headings, and stop when it is answered.";
