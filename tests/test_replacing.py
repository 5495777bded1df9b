"""Attributes that have another value within a block."""

import pytest

from largebatch.replacing import replaced


class Base:
    value = 1

    def method(self) -> int:
        return self.value


class Derived(Base):
    pass


def test_an_attribute_of_an_object_is_restored_after_an_error() -> None:
    owner = Derived()

    def fail() -> int:
        raise KeyError

    with pytest.raises(KeyError), replaced(owner, "method", fail):
        owner.method()
    assert owner.method() == 1
    assert vars(owner) == {}


def test_an_inherited_attribute_is_not_left_in_a_class() -> None:
    with replaced(Derived, "value", 3):
        assert (Derived.value, Base.value) == (3, 1)
    assert "value" not in vars(Derived)


def test_an_own_attribute_of_a_class_is_restored() -> None:
    before = vars(Base)["method"]
    with replaced(Base, "method", lambda _: 4):
        assert Derived().method() == 4
    assert vars(Base)["method"] is before
