"""The syntax tree of a chat template, changed so that what no function is called for is charged too.

The hooks are filters, since jinja2 calls those without a detour. Their names are none that a template can write.
"""

from typing import ClassVar

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer


class Meter(NodeTransformer):
    """Has loops and macros count their rounds, and comparisons, slices, keys and `~` the size of what they take."""

    TICK: ClassVar[str] = "tick!"
    JOIN: ClassVar[str] = "join!"
    WEIGH: ClassVar[str] = "weigh!"
    COPY: ClassVar[str] = "copy!"
    SEARCH: ClassVar[str] = "search!"

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count(node)
        if node.test is not None:  # rounds that it leaves out are rounds all the same
            node.test = nodes.Or(self._tick(0, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._count(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        for place, child in enumerate(node.nodes):
            if isinstance(child, nodes.Const) and isinstance(child.value, str):
                node.nodes[place] = nodes.TemplateData(child.value, lineno=child.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._hook(self.JOIN, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Neg(self, node: nodes.Neg) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.node, nodes.Const) and type(node.node.value) in (int, float):
            return nodes.Const(-node.node.value, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._hook(self.COPY, node.node)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = self._hook(self.WEIGH, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._hook(self.WEIGH, node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        single = len(node.ops) == 1
        if single and _is_small(node.ops[0].expr):
            return node
        if not (single and _is_small(node.expr)):
            node.expr = self._hook(self.WEIGH, node.expr)
        elif node.ops[0].op not in ("in", "notin"):
            return node
        for operand in node.ops:
            if not _is_small(operand.expr):
                name = self.SEARCH if operand.op in ("in", "notin") else self.WEIGH
                operand.expr = self._hook(name, operand.expr)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("chat templates have no autoescape", node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        constant = sum(map(_constant, node.body))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._tick(constant, node.lineno), lineno=node.lineno))
        return node

    def _tick(self, constant: int, line: int) -> nodes.Filter:
        return self._hook(self.TICK, nodes.Const(constant, lineno=line))

    @staticmethod
    def _hook(name: str, value: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _constant(node: nodes.Node) -> int:
    """The most characters of constant text in one round. What is in loops and macros counts itself."""
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
        return sum(map(_constant, node.else_)) if isinstance(node, nodes.For) else 0
    if isinstance(node, nodes.If):
        return max(sum(map(_constant, body)) for body in (node.body, node.elif_, node.else_))
    return sum(map(_constant, node.iter_child_nodes()))


def _is_small(node: nodes.Expr) -> bool:
    """Whether a comparison with it takes no longer than the template is long."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)
