// A field over the long tables, which are whole without it: rows with all of its words stay.
for (const table of document.querySelectorAll(
  "#families table, #the-flax-classes-of-transformers-4 table"
)) {
  const rows = [...table.tBodies[0].rows];
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = `Search ${rows.length} rows`;
  field.setAttribute("aria-label", "Search the table");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  (table.closest(".table-wrapper") ?? table).before(field);
}
