// Values under the pointer: the nearest point of each curve, next to a vertical line.
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("figcaption ~ svg"), size = svg.viewBox.baseVal;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", size.height * 0.04);
  cursor.setAttribute("y2", size.height * 0.81);
  svg.append(cursor);
  const box = document.createElement("div");
  box.className = "read-out";
  box.hidden = true;
  figure.append(box);
  const number = (y) => data.percent ? (100 * y).toFixed(1) + "%" : Number(y.toPrecision(4)).toLocaleString("en");
  const hide = () => { box.hidden = true; cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const at = (event.clientX - frame.left) / frame.width;
    if (at < data.left || at > data.right) return hide();
    const x = data.low + (at - data.left) / (data.right - data.left) * (data.high - data.low);
    box.replaceChildren(Object.assign(document.createElement("div"), {
      className: "soft", textContent: (x < 100 ? Number(x.toPrecision(3)) : Math.round(x)).toLocaleString("en") + " samples seen",
    }));
    for (const series of data.series) {
      let best = 0;
      series.xs.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(series.xs[best] - x)) best = i; });
      const dot = Object.assign(document.createElement("i"), { className: "dot b" + series.colour });
      const row = document.createElement("div");
      row.append(dot, series.label + "  " + number(series.ys[best]));
      box.append(row);
    }
    box.hidden = false;
    cursor.setAttribute("x1", at * size.width);
    cursor.setAttribute("x2", at * size.width);
    cursor.style.visibility = "visible";
    const outer = figure.getBoundingClientRect(), left = event.clientX - outer.left;
    const edge = left > outer.width / 2 ? left - box.offsetWidth - 14 : left + 14;
    box.style.left = Math.max(4, Math.min(outer.width - box.offsetWidth - 4, edge)) + "px";
    box.style.top = frame.top - outer.top + 8 + "px";
  });
}
