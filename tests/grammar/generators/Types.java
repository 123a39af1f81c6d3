// Prints the schemas that victools' jsonschema-generator writes, with its modules for Jackson and Jakarta validation:
// java -cp JARS Types.java > victools.json
import com.fasterxml.jackson.annotation.*;
import com.fasterxml.jackson.databind.*;
import com.fasterxml.jackson.databind.node.ObjectNode;
import com.github.victools.jsonschema.generator.*;
import com.github.victools.jsonschema.module.jackson.*;
import com.github.victools.jsonschema.module.jakarta.validation.*;
import jakarta.validation.constraints.*;
import java.math.BigDecimal;
import java.net.URI;
import java.time.*;
import java.util.*;

public class Types {
    enum Color { red, green, blue }
    enum Level { LOW(1), MID(2), HIGH(3); private final int level; Level(int level) { this.level = level; } @JsonValue public int level() { return level; } }
    static class Closed { public int a; }
    static class Cat extends Animal { public int lives; }
    static class Dog extends Animal { public String name; }
    @JsonTypeInfo(use = JsonTypeInfo.Id.NAME, property = "kind")
    @JsonSubTypes({@JsonSubTypes.Type(value = Cat.class, name = "cat"), @JsonSubTypes.Type(value = Dog.class, name = "dog")})
    static abstract class Animal { }
    static class Named { public String name; }
    static class Aged extends Named { public int age; }
    static class Tree { public int value; public List<Tree> children; }
    static class Person { public String name; public List<Pet> pets; }
    static class Pet { public String name; public Person owner; }
    static class Box<T> { public T content; }
    static class Boxes { public Box<Integer> a; public Box<String> b; }
    static class Point { public double x; public double y; }
    static class Line { public Point from; @JsonPropertyDescription("the end") public Point to; }

    static class Fields {
        @NotNull public String string;
        @NotNull @Size(min = 2, max = 10) public String string_length;
        @NotNull @Pattern(regexp = "^[A-Z]{2}\\d{3}$") public String string_pattern;
        @NotNull @Pattern(regexp = "^https://.*") public String string_prefix;
        @NotNull @Email public String email;
        @NotNull public UUID uuid;
        @NotNull public URI uri;
        @NotNull public LocalDate date;
        @NotNull public OffsetTime time;
        @NotNull public OffsetDateTime date_time;
        @NotNull public Duration duration;
        @NotNull public byte[] bytes;
        @NotNull @NotBlank public String identifier;
        @NotNull public Integer integer;
        @NotNull @Min(0) @Max(130) public Integer integer_range;
        @NotNull public Long long_;
        @NotNull public Double number;
        @NotNull @DecimalMin(value = "0", inclusive = false) @DecimalMax("1") public Double number_range;
        @NotNull @PositiveOrZero public BigDecimal decimal;
        @NotNull public Boolean boolean_;
        @Null public String nullable;
        public String optional;
        @JsonProperty(defaultValue = "3") public Integer default_;
        @NotNull public Color enum_of_strings;
        @NotNull public Level enum_of_numbers;
        @NotNull public List<String> array;
        @NotNull @Size(min = 1, max = 3) public List<Integer> array_bounds;
        @NotNull public Set<String> set;
        @NotNull public Set<Color> set_of_an_enum;
        @NotNull public Map<String, Integer> map;
        @NotNull public EnumMap<Color, Integer> map_by_keys;
        @NotNull public Closed closed_object;
        @NotNull public Map<String, Object> open_object;
        @NotNull public Animal discriminated_union;
        @NotNull public Aged intersection;
        @NotNull public Tree recursive;
        @NotNull public Person mutually_recursive;
        @NotNull public Boxes generic;
        @NotNull public Line shared;
        @NotNull public Object any;
    }

    // Java has no such type, or the generator does not know it.
    static final List<String> NONE = List.of("ipv4", "ipv6", "hostname", "multiple", "constant", "tuple", "tuple and rest", "map by pattern", "union");

    public static void main(String[] args) throws Exception {
        ObjectMapper mapper = new ObjectMapper();
        ObjectNode types = mapper.createObjectNode();
        for (java.lang.reflect.Field field : Fields.class.getFields()) {
            SchemaGeneratorConfigBuilder builder = new SchemaGeneratorConfigBuilder(mapper, SchemaVersion.DRAFT_2020_12, OptionPreset.PLAIN_JSON)
                .with(new JacksonModule(JacksonOption.FLATTENED_ENUMS_FROM_JSONVALUE, JacksonOption.RESPECT_JSONPROPERTY_REQUIRED))
                .with(new JakartaValidationModule(JakartaValidationOption.NOT_NULLABLE_FIELD_IS_REQUIRED, JakartaValidationOption.INCLUDE_PATTERN_EXPRESSIONS))
                .with(Option.FORBIDDEN_ADDITIONAL_PROPERTIES_BY_DEFAULT, Option.EXTRA_OPEN_API_FORMAT_VALUES, Option.MAP_VALUES_AS_ADDITIONAL_PROPERTIES);
            builder.forFields().withIgnoreCheck(other -> other.getDeclaringType().getErasedType() == Fields.class && !other.getDeclaredName().equals(field.getName()))
                .withPropertyNameOverrideResolver(other -> other.getDeclaringType().getErasedType() == Fields.class ? "v" : null);
            String name = field.getName().replaceAll("_$", "").replace('_', ' ').replace("date time", "date-time");
            types.set(name, new SchemaGenerator(builder.build()).generateSchema(Fields.class));
        }
        for (String name : NONE) {
            types.putNull(name);
        }
        ObjectNode found = mapper.createObjectNode().put("generator", "victools/jsonschema-generator 4.38.0");
        found.set("types", types);
        System.out.println(mapper.writeValueAsString(found));
    }
}
