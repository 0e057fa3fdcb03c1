// Elements, without HTML in strings: what comes from a request can only ever be text.

/** The element with that id. */
export const byId = (id) => document.getElementById(id);

/** A new element; properties that the element lacks become attributes. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Seconds as people read them. */
export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}
