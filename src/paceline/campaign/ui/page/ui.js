"use strict";
// Lists and logs of `paceline ui`. Text from the server enters as text nodes; only the server's own lists enter as markup.
(() => {
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // --- ticks: two make a comparison ---

  const ticked = () => $$('input[name="tick"]:checked').length;
  const compare = () => $$('[formaction="/compare"]').forEach(button => { button.disabled = ticked() !== 2; });
  document.addEventListener("change", event => { if (event.target.name === "tick") compare(); });
  compare();

  // --- answers of finished campaigns, one after the other ---

  (async () => {
    for (const cell of $$("[data-answer]")) {
      const answer = await fetch(cell.dataset.answer).catch(() => null);
      if (answer?.ok) cell.textContent = await answer.text();
    }
  })();

  // --- search while typing: the server filters, the list is exchanged ---

  const search = document.getElementById("search");
  let timer = 0, asked = 0;
  async function refresh() {
    const words = new URLSearchParams(new FormData(search)), mine = ++asked;
    words.delete("tick");
    for (const [name, value] of [...words]) if (!value) words.delete(name);
    const address = `${location.pathname}?${words}`;
    const answer = await fetch(address);
    if (!answer.ok || mine !== asked) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const rows = document.getElementById("rows");
    rows.replaceChildren(...page.getElementById("rows").childNodes);
    $$("table", rows).forEach(Paceline.dress);
    history.replaceState(null, "", address);
    compare();
  }
  if (search) {
    search.addEventListener("input", event => {
      if (event.target.name === "tick") return;
      clearTimeout(timer);
      timer = setTimeout(refresh, event.target.type === "search" ? 250 : 0);
    });
    search.addEventListener("submit", event => { if (!event.submitter?.hasAttribute("formaction")) { event.preventDefault(); refresh(); } });
  }

  // --- logs ---

  const MOST_LINES = 5000;
  function follow(panel) {
    const pre = panel.querySelector("pre"), state = panel.querySelector('[role="status"]');
    const field = name => panel.querySelector(`[name="${name}"]`);
    let source = null, lines = [], waiting = false;
    const show = () => {
      waiting = false;
      const words = field("find").value.toLowerCase();
      const kept = words ? lines.filter(line => line.toLowerCase().includes(words)) : lines;
      pre.textContent = kept.join("\n");
      if (field("follow").checked) pre.scrollTop = pre.scrollHeight;
    };
    const later = () => { if (!waiting) { waiting = true; requestAnimationFrame(show); } };
    function open() {
      source?.close();
      lines = [];
      state.textContent = "";
      later();
      if (!panel.dataset.events) return;
      const rank = field("rank").value;
      source = new EventSource(panel.dataset.events + (rank === "" ? "" : `?rank=${rank}`));
      source.addEventListener("lines", event => {
        lines.push(...JSON.parse(event.data));
        if (lines.length > MOST_LINES) lines = lines.slice(-MOST_LINES);
        later();
      });
      source.addEventListener("note", event => { state.textContent = JSON.parse(event.data); });
      source.addEventListener("end", () => source.close());
    }
    field("rank").addEventListener("change", open);
    field("find").addEventListener("input", later);
    panel.addEventListener("paceline-run", event => { panel.dataset.events = event.detail; open(); });
    if (panel.dataset.events) open();
  }
  $$(".log").forEach(follow);
})();
